# SPDX-License-Identifier: Apache-2.0
"""``DpaMoEMethod``: weights, loading and forward of one MoE layer inside vLLM."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from vllm_dpa import runtime, vllm_seams
from vllm_dpa.allocation import allocate
from vllm_dpa.checkpoint import chunk_specs, make_stacks
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels import dispatch
from vllm_dpa.safetensors_stream import Spec


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
        """Allocate one parameter per stored tensor, so that a plane can be freed on its own.

        Raises:
            DpaError: the model disagrees with the checkpoint, or needs what is not supported.
        """
        facts = vllm_seams.experts_facts(layer)
        self._shape = self._state.reader.layer(facts.layer_name)
        self._check(facts, (num_experts, hidden_size, intermediate_size_per_partition))
        for chunk, name, (dtype, size) in self._stored_tensors():
            value = torch.zeros(size, dtype=dtype)
            layer.register_parameter(
                _parameter(name, chunk), torch.nn.Parameter(value, requires_grad=False)
            )

    def _stored_tensors(self) -> Iterator[tuple[int, str, Spec]]:
        """(chunk, name without the layer prefix, (dtype, shape)) of what this layer loads."""
        shape = self._shape
        for chunk in range(self._state.options.max_chunks):
            for name, spec in chunk_specs(shape, self._state.reader.settings, chunk).items():
                yield chunk, name.removeprefix(f"{shape.prefix}."), spec

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
        """Fill the parameters from the chunk files and hand the layer to the runtime."""
        state, shape = self._state, self._shape
        if not vllm_seams.loads_dummy_weights():
            for chunk, name, tensor in state.reader.layer_tensors(shape.prefix):
                getattr(layer, _parameter(name, chunk)).data.copy_(tensor)
        parts: dict[str, list[Tensor]] = {}
        for chunk, name, _ in self._stored_tensors():
            parts.setdefault(name, []).append(getattr(layer, _parameter(name, chunk)).data)
        state.add_layer(shape, *make_stacks(shape, state.reader.settings, parts))

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


def _parameter(name: str, chunk: int) -> str:
    """Parameter name of a stored tensor: ``w13.plane`` of chunk 3 is ``dpa_w13_plane_3``."""
    return f"dpa_{name.replace('.', '_')}_{chunk}"


# Opaque to torch.compile, which on the CPU backend traces into apply().
@torch.library.custom_op("vllm_dpa::moe_apply", mutates_args=())
def moe_apply(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer_name: str) -> Tensor:
    """Allocate chunks for one dispatch and compute its routed output."""
    state = runtime.worker()
    layer = state.layers[layer_name]
    counts = allocate(
        topk_weights, topk_ids, layer.cost, state.k_bar, state.mode, state.options.scope
    )
    return dispatch.fused_moe(x, layer.w13, layer.w2, topk_weights, topk_ids, counts)


@moe_apply.register_fake
def _(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer_name: str) -> Tensor:
    return x.new_empty(x.shape)
