# SPDX-License-Identifier: Apache-2.0
"""Device -> implementation. The only place that knows which kernels exist."""

from torch import Tensor

from . import reference
from .cpu import fused_moe as cpu_fused_moe
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
    if x.device.type != "cpu":
        raise NotImplementedError(
            f"vllm-dpa has no fused-MoE kernel for device type {x.device.type!r} yet; use the CPU"
        )
    return cpu_fused_moe.fused_moe(x, w13, w2, topk_weights, topk_ids, chunk_counts)


def knapsack(cost: Tensor, active: Tensor, budget: Tensor, min_chunks: int) -> Tensor:
    """Chunk counts int64 [B, n]; arguments as in :func:`.reference.knapsack`."""
    return reference.knapsack(cost, active, budget, min_chunks)
