# SPDX-License-Identifier: Apache-2.0
"""Device -> implementation. The only place that knows which kernels exist."""

from torch import Tensor

from .budget import Budget
from .cpu import fused_moe as cpu_fused_moe
from .cpu import native
from .cpu.packed import PackedLayer


def fused_moe(
    x: Tensor,
    layer: PackedLayer,
    topk_weights: Tensor,
    topk_ids: Tensor,
    chunks: Tensor | Budget,
    activations: str = "int8",
    path: str = "auto",
) -> Tensor:
    """Routed output [T, H] of one MoE layer; see :func:`.cpu.fused_moe.fused_moe`.

    Raises:
        NotImplementedError: no kernel for the device of ``x``.
    """
    _require_cpu(x)
    return cpu_fused_moe.fused_moe(x, layer, topk_weights, topk_ids, chunks, activations, path)


def allocate(gates: Tensor, topk_ids: Tensor, budget: Budget) -> Tensor:
    """Chunk counts of one dispatch; see :func:`.reference.allocate`.

    Raises:
        NotImplementedError: no kernel for the device of ``gates``.
    """
    _require_cpu(gates)
    return native.allocate(gates, topk_ids, budget)


def _require_cpu(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise NotImplementedError(
            f"vllm-dpa has no kernels for device type {tensor.device.type!r} yet; use the CPU"
        )
