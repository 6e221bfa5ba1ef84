# SPDX-License-Identifier: Apache-2.0
"""Plain-torch definitions of decode, fused MoE and the exact allocator.

Every other implementation is tested against these. They are written to be read, not to be fast.
"""

import torch
from torch import Tensor

from .budget import Budget
from .planes import MIN_CHUNKS, PlaneStack, unpack_bits

INFINITY = float("inf")


def decode(stack: PlaneStack, expert: int, k: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Weights of one expert at tier k, ``dtype`` [N, C], gain included.

    Raises:
        ValueError: k is not in 1..resident chunks.
    """
    stack.check_chunks(k)
    columns = torch.arange(stack.columns, device=stack.offset.device)
    group = columns // stack.group_size
    weight = stack.offset[expert].to(dtype)[:, group]
    for j in range(k):
        sign = unpack_bits(stack.planes[j][expert], stack.columns).to(dtype) * 2 - 1
        weight = weight + stack.plane_scale(expert, j).to(dtype)[:, group] * sign
    gain = stack.gain[expert, :, k].to(dtype)
    return weight * gain.repeat_interleave(stack.rows // len(gain))[:, None]


def fused_moe(
    x: Tensor,
    w13: PlaneStack,
    w2: PlaneStack,
    topk_weights: Tensor,
    topk_ids: Tensor,
    chunk_counts: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Routed output of one MoE layer, computed pair by pair.

    Args:
        x: [T, H], any float dtype.
        w13: gate rows then up rows, [E, 2I, H].
        w2: [E, H, I].
        topk_weights: [T, K] gates, applied to the expert's output.
        topk_ids: integer [T, K]; -1 contributes nothing.
        chunk_counts: integer k, [E] (one per expert) or [T, K] (one per token and slot).
        dtype: in which to compute.

    Returns:
        ``dtype`` [T, H].
    """
    out = torch.zeros(x.shape[0], w2.rows, dtype=dtype, device=x.device)
    for t in range(topk_ids.shape[0]):
        for slot in range(topk_ids.shape[1]):
            expert = int(topk_ids[t, slot])
            if expert < 0:
                continue
            k = int(chunk_counts[expert] if chunk_counts.dim() == 1 else chunk_counts[t, slot])
            gate, up = (decode(w13, expert, k, dtype) @ x[t].to(dtype)).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            out[t] += topk_weights[t, slot].to(dtype) * (decode(w2, expert, k, dtype) @ hidden)
    return out


def knapsack(cost: Tensor, active: Tensor, budget: Tensor, min_chunks: int) -> Tensor:
    """Exact multi-choice knapsack: one k per item, the sum of k equal to the budget.

    For every row b, minimises ``sum_i cost[b, i, k_i - min_chunks]`` over the active items, subject
    to ``sum_i k_i = budget[b]``.

    Tie rule: of all optimal allocations, the one that gives the larger k to the lower item index
    (lexicographically largest). To make this hold bit for bit elsewhere, the arithmetic is part of
    the definition: ``tail_i(b) = min over k, descending, of cost[i, k] + tail_{i+1}(b - k)`` with one
    addition in the dtype of ``cost`` per candidate, a later candidate replacing an earlier one only
    if it is strictly smaller; items are then walked from the first to the last.

    Args:
        cost: float [B, n, C]; C choices k = min_chunks .. min_chunks + C - 1. Finite where active.
        active: bool [B, n]. Inactive items get k = 0 and no budget.
        budget: int64 [B], within ``[n_active * min_chunks, n_active * (min_chunks + C - 1)]``.
        min_chunks: the smallest k.

    Returns:
        int64 [B, n] chunk counts.

    Raises:
        ValueError: a budget that its active items cannot meet.
    """
    rows, items, choices = cost.shape
    check_budget(active, budget, min_chunks, choices)
    spare = budget - active.sum(1) * min_chunks  # chunks beyond the minimum, to be handed out
    width = int(spare.max()) + 1 if rows else 1
    tail = torch.full((rows, width), INFINITY, dtype=cost.dtype, device=cost.device)
    tail[:, 0] = 0
    pick = torch.zeros(items, rows, width, dtype=torch.int64, device=cost.device)
    for i in range(items - 1, -1, -1):
        best = torch.full_like(tail, INFINITY)
        for extra in range(min(choices, width) - 1, -1, -1):
            candidate = torch.full_like(tail, INFINITY)
            candidate[:, extra:] = tail[:, : width - extra] + cost[:, i, extra, None]
            better = candidate < best
            best = torch.where(better, candidate, best)
            pick[i] = torch.where(better, extra, pick[i])
        keep = active[:, i, None]
        tail = torch.where(keep, best, tail)
        pick[i] = torch.where(keep, pick[i], 0)
    counts = torch.zeros(rows, items, dtype=torch.int64, device=cost.device)
    for i in range(items):
        given = pick[i].gather(1, spare[:, None])[:, 0]
        counts[:, i] = torch.where(active[:, i], given + min_chunks, 0)
        spare = spare - given
    return counts


def budget_chunks(n_active: Tensor, k_bar: Tensor, max_chunks: int) -> Tensor:
    """B = clamp(rint(n * k_bar), n * min, n * max), int64; rint rounds halves to even."""
    wanted = torch.round(n_active.double() * k_bar.double()).long()
    return wanted.clamp(n_active * MIN_CHUNKS, n_active * max_chunks)


def allocate(gates: Tensor, topk_ids: Tensor, budget: Budget) -> Tensor:
    """Chunk counts of one dispatch: a knapsack over its active experts, or one over each token's.

    The cost of k chunks for an expert is ``table[expert, k]`` times its gate energy, the sum over its
    tokens of gate^2, summed in float64 in the order of (token, slot) and rounded to float32. Negative
    gates count as 0. Items are in the order of expert ids, which the tie rule of :func:`knapsack`
    goes by. Rule ``uniform`` gives rint(k_bar), halves to even, within 2..K.

    Args:
        gates: [T, K].
        topk_ids: integer [T, K]; -1 is padding.
        budget: the layer's cost table and the budget.

    Returns:
        int64 [E] (0 for experts that are not active), or [T, K] if ``per_token`` (0 at padding).
    """
    real = topk_ids >= 0
    ids = topk_ids.long().clamp_min(0)
    energy = gates.float().clamp_min(0) ** 2
    if not budget.use_gates:
        energy = torch.ones_like(energy)
    if budget.per_token:
        order = torch.where(real, ids, budget.num_experts).argsort(dim=1, stable=True)
        energy, experts, active = (v.gather(1, order) for v in (energy, ids, real))
        counts = _counts(energy, experts, active, budget)
        return torch.zeros_like(counts).scatter_(1, order, counts)
    summed = torch.zeros(budget.num_experts, dtype=torch.float64)
    for expert, value in zip(ids[real].tolist(), energy[real].double(), strict=True):
        summed[expert] += value
    experts = ids[real].unique()[None]
    active = torch.ones_like(experts, dtype=torch.bool)
    counts = _counts(summed.float()[experts], experts, active, budget)
    zeros = torch.zeros(budget.num_experts, dtype=torch.int64)
    return zeros.index_copy_(0, experts[0], counts[0])


def _counts(energy: Tensor, experts: Tensor, active: Tensor, budget: Budget) -> Tensor:
    """int64 [B, n] for items of float32 energy, int64 experts and bool active, each [B, n]."""
    if budget.rule == "uniform":
        k = torch.round(budget.k_bar).long().clamp(MIN_CHUNKS, budget.max_chunks)
        return torch.where(active, k, 0)
    cost = energy[..., None] * budget.table[experts][..., MIN_CHUNKS:]
    chunks = budget_chunks(active.sum(1), budget.k_bar, budget.max_chunks)
    return knapsack(cost, active, chunks, MIN_CHUNKS)


def check_budget(active: Tensor, budget: Tensor, min_chunks: int, choices: int) -> None:
    """Raise ValueError unless every row's active items can meet its budget."""
    n_active = active.sum(1)
    low, high = n_active * min_chunks, n_active * (min_chunks + choices - 1)
    if bool(((budget < low) | (budget > high)).any()):
        raise ValueError(
            f"budget outside n_active * [{min_chunks}, {min_chunks + choices - 1}] in some row"
        )
