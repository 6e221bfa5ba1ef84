# SPDX-License-Identifier: Apache-2.0
"""Exact code step: the best 8-bit code of every weight, given the scales of its group.

With c_k the decode of code c at tier k, a weight w costs, up to a constant,
``sum_k w_k (w - c_k)^2 = q(c) - 2 w m(c)`` where ``m = sum_k w_k c_k`` and ``q = sum_k w_k c_k^2``.
That is a line in w for each of the 256 codes, so the best code is the lower envelope of 256 lines:
sort by slope once per group, drop the lines that are nowhere lowest, and search.
"""

import torch
from torch import Tensor
from vllm_dpa.kernels.planes import NUM_CHUNKS

NUM_CODES = 2**NUM_CHUNKS


def sign_table(device: torch.device | str = "cpu") -> Tensor:
    """float32 [256, 8]: the sign b_j of plane j in every code; plane 0 is the code's top bit."""
    code = torch.arange(NUM_CODES, device=device)
    shift = torch.arange(NUM_CHUNKS - 1, -1, -1, device=device)
    return ((code[:, None] >> shift) & 1).float() * 2 - 1


def code_lines(scale: Tensor, tier_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Slope m and intercept q of all codes, for weights measured from the group's offset.

    Args:
        scale: float32 [n, 8].
        tier_weights: float32 [9], index k; entries for unused tiers are 0.

    Returns:
        (m, q), each float32 [n, 256].
    """
    value = scale.new_zeros(scale.shape[0], 1)
    slope, intercept = value, value
    for j in range(NUM_CHUNKS):
        # Codes are in order of their bits, top plane first: every prefix splits in two.
        step = scale[:, j, None]
        value = torch.stack((value - step, value + step), dim=-1).flatten(1)
        weight = tier_weights[j + 1]
        slope = slope.repeat_interleave(2, 1) + weight * value
        intercept = intercept.repeat_interleave(2, 1) + weight * value * value
    return slope, intercept


def lower_envelope(slope: Tensor, intercept: Tensor) -> tuple[Tensor, Tensor]:
    """Breakpoints of ``min_c intercept[c] - 2 w slope[c]`` over w.

    Args:
        slope, intercept: float32 [n, L].

    Returns:
        (breakpoints, order): float32 [n, L - 1], non-decreasing, and int64 [n, L] such that
        ``order[searchsorted(breakpoints, w)]`` is the line that is lowest at w. Lines that are
        nowhere lowest are dropped; the tail is filled with +inf and the last line.
    """
    slope, order = slope.sort(dim=1)
    intercept = intercept.gather(1, order)
    order = order.clone()
    size = torch.full((len(slope),), slope.shape[1], device=slope.device)
    rows = torch.arange(len(slope), device=slope.device)
    while len(rows):
        rows, part = _drop_hidden_lines(slope, intercept, order, size, rows)
        if part is None:
            break
    run = slope[:, 1:] - slope[:, :-1]
    rise = intercept[:, 1:] - intercept[:, :-1]
    breakpoints = rise / (2 * run)
    # Two equal lines give 0 / 0: either may serve, so the boundary falls on its predecessor.
    breakpoints = breakpoints.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    position = torch.arange(breakpoints.shape[1], device=slope.device)
    breakpoints.masked_fill_(position >= (size - 1)[:, None], torch.inf)
    return breakpoints.cummax(dim=1).values, order


def _drop_hidden_lines(
    slope: Tensor, intercept: Tensor, order: Tensor, size: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """One pass of hull pruning over ``rows``, in place; returns the rows that changed.

    A point (slope, intercept) strictly above the chord of its neighbours is on no lower hull, so all
    such points may go at once.
    """
    m, q, o, count = slope[rows], intercept[rows], order[rows], size[rows]
    left = (q[:, 1:-1] - q[:, :-2]) * (m[:, 2:] - m[:, 1:-1])
    right = (q[:, 2:] - q[:, 1:-1]) * (m[:, 1:-1] - m[:, :-2])
    position = torch.arange(1, m.shape[1] - 1, device=m.device)
    hidden = (left > right) & (position < (count - 1)[:, None])
    changed = hidden.any(1)
    if not bool(changed.any()):
        return rows[:0], None
    rows, m, q, o, count = rows[changed], m[changed], q[changed], o[changed], count[changed]
    keep = torch.ones_like(m, dtype=torch.bool)
    keep[:, 1:-1] = ~hidden[changed]
    keep &= torch.arange(m.shape[1], device=m.device) < count[:, None]
    count = keep.sum(1)
    # Stable compaction: kept entries first, then copies of the last one.
    source = torch.argsort((~keep).to(torch.uint8), dim=1, stable=True)
    last = source.gather(1, (count - 1)[:, None])
    tail = torch.arange(m.shape[1], device=m.device) >= count[:, None]
    source = torch.where(tail, last, source)
    slope[rows], intercept[rows] = m.gather(1, source), q.gather(1, source)
    order[rows], size[rows] = o.gather(1, source), count
    return rows, keep


def best_codes(weight: Tensor, offset: Tensor, scale: Tensor, tier_weights: Tensor) -> Tensor:
    """The code that minimises the objective, for every weight.

    Args:
        weight: float32 [n, G].
        offset: float32 [n].
        scale: float32 [n, 8].
        tier_weights: float32 [9].

    Returns:
        uint8 [n, G]; plane j is bit 7 - j.
    """
    slope, intercept = code_lines(scale, tier_weights)
    breakpoints, order = lower_envelope(slope, intercept)
    index = torch.searchsorted(breakpoints, (weight - offset[:, None]).contiguous())
    return order.gather(1, index).to(torch.uint8)
