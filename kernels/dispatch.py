# SPDX-License-Identifier: Apache-2.0
"""Device -> implementation. The only place that knows which kernels exist."""

from torch import Tensor

from .cpu import fused_moe as cpu_fused_moe
from .cpu import native
from .planes import PlaneStack


def fused_moe(
    x: Tensor,
    w13: PlaneStack,
    w2: PlaneStack,
    topk_weights: Tensor,
    topk_ids: Tensor,
    chunk_counts: Tensor,
) -> Tensor:
    """Routed output [T, H] of one MoE layer; arguments as in :func:`.reference.fused_moe`.

    Raises:
        NotImplementedError: no kernel for the device of ``x``.
    """
    _require_cpu(x)
    return cpu_fused_moe.fused_moe(x, w13, w2, topk_weights, topk_ids, chunk_counts)


def knapsack(cost: Tensor, active: Tensor, budget: Tensor, min_chunks: int) -> Tensor:
    """Chunk counts int64 [B, n]; arguments as in :func:`.reference.knapsack`, cost in float32.

    Raises:
        NotImplementedError: no kernel for the device of ``cost``.
    """
    _require_cpu(cost)
    return native.knapsack(cost, active, budget, min_chunks)


def _require_cpu(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise NotImplementedError(
            f"vllm-dpa has no kernels for device type {tensor.device.type!r} yet; use the CPU"
        )
