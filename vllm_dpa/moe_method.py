# SPDX-License-Identifier: Apache-2.0
"""``DpaMoEMethod``: weights, loading and forward of one MoE layer inside vLLM."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from vllm_dpa import runtime, vllm_seams
from vllm_dpa.checkpoint import LayerShape, gain_blocks
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels import dispatch
from vllm_dpa.kernels.cpu.packed import MatrixShape, PackedLayer, PackedMatrix
from vllm_dpa.settings import CheckpointSettings


class DpaMoEMethod(FusedMoEMethodBase):
    """Serves a layer's routed experts from the first ``max_chunks`` chunks of the sidecar files.

    vLLM routes before ``apply`` and reduces after it; shared experts are the runner's.
    """

    def __init__(self, moe: FusedMoEConfig, state: runtime.WorkerState) -> None:
        super().__init__(moe)
        self._state = state

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Allocate the packed experts, one parameter per buffer; a plane is a buffer of its own.

        Raises:
            DpaError: the model disagrees with the checkpoint, or needs what is not supported.
        """
        facts = vllm_seams.experts_facts(layer)
        self._shape = self._state.reader.layer(facts.layer_name)
        self._check(facts, (num_experts, hidden_size, intermediate_size_per_partition))
        settings, chunks = self._state.reader.settings, self._state.options.max_chunks
        self._experts = empty_experts(self._shape, settings, chunks)
        for name, buffer in self._experts.buffers().items():
            layer.register_parameter(f"dpa_{name}", torch.nn.Parameter(buffer, requires_grad=False))

    def _check(self, facts: vllm_seams.ExpertsFacts, sizes: tuple[int, int, int]) -> None:
        shape = self._shape
        where = f"{self._state.reader.path}: layer {shape.prefix}"
        wanted = (shape.num_experts, shape.hidden_size, shape.intermediate_size)
        if sizes != wanted or facts.global_num_experts != shape.num_experts:
            raise DpaError(
                f"{where}: config.json asks for (experts, hidden, intermediate) = {sizes}, the "
                f"chunks hold {wanted}; config.json was changed or belongs to another model"
            )
        if facts.activation != "silu":
            raise DpaError(f"{where}: activation {facts.activation!r} is not supported, only silu")
        if facts.has_bias or facts.swiglu_limit is not None or facts.apply_router_weight_on_input:
            raise DpaError(
                f"{where}: expert biases, clamped swiglu and router weights on the input are not "
                "supported"
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Fill the packed experts from the chunk files and hand the layer to the runtime.

        One chunk of one layer is held in canonical form at a time.
        """
        state, shape = self._state, self._shape
        if not vllm_seams.loads_dummy_weights():
            for chunk, parts in enumerate(state.reader.layer_chunks(shape.prefix)):
                put_chunk(self._experts, chunk, parts)
        state.add_layer(shape, self._experts)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Routed output [T, H] in the dtype of ``x``, not reduced over ranks."""
        return torch.ops.vllm_dpa.moe_apply(x, topk_weights, topk_ids, self._shape.prefix)


def empty_experts(shape: LayerShape, settings: CheckpointSettings, chunks: int) -> PackedLayer:
    """Packed experts of a layer, all zeros, for the first ``chunks`` chunks."""
    w13, w2 = (
        PackedMatrix(
            MatrixShape(
                *(shape.num_experts, rows, columns),
                *(settings.group_size, settings.scale_layout, name == "w13"),
            ),
            chunks,
        )
        for name, (rows, columns, _) in shape.matrices().items()
    )
    return PackedLayer(w13, w2)


def put_chunk(experts: PackedLayer, chunk: int, parts: dict[str, Tensor]) -> None:
    """Store one chunk of a layer, its tensors by name as in :func:`..checkpoint.chunk_specs`."""
    for name, matrix in (("w13", experts.w13), ("w2", experts.w2)):
        scale = parts.get(f"{name}.scale")
        if chunk == 0:
            gain = gain_blocks(parts["gain"])[name]
            matrix.put_sides(parts[f"{name}.offset"], scale, gain)
        matrix.put(chunk, parts[f"{name}.plane"], scale)


# Opaque to torch.compile, which on the CPU backend traces into apply().
@torch.library.custom_op("vllm_dpa::moe_apply", mutates_args=())
def moe_apply(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer_name: str) -> Tensor:
    """Allocate chunks for one dispatch and compute its routed output."""
    state = runtime.worker()
    layer = state.layers[layer_name]
    return dispatch.fused_moe(
        *(x, layer.experts, topk_weights, topk_ids, layer.budget),
        *(state.options.activations, state.path),
    )


@moe_apply.register_fake
def _(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer_name: str) -> Tensor:
    return x.new_empty(x.shape)
