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
    hull = _Hull(slope, intercept)
    rows = torch.arange(len(slope), device=slope.device)
    while len(rows):
        rows = hull.drop_hidden(rows)
    return hull.breakpoints(), hull.order


class _Hull:
    """Points (slope, intercept) per row, sorted by slope, being thinned to their lower hull.

    Row r holds ``size[r]`` points with strictly ascending slopes, then copies of the last one.
    """

    def __init__(self, slope: Tensor, intercept: Tensor) -> None:
        self.slope, self.order = slope.sort(dim=1)
        self.intercept = intercept.gather(1, self.order)
        self.size = torch.full((len(slope),), slope.shape[1], device=slope.device)
        tied = torch.nonzero((self.slope[:, 1:] == self.slope[:, :-1]).any(1))[:, 0]
        if len(tied):
            self._merge_equal_slopes(tied, slope[tied], intercept[tied])

    def _merge_equal_slopes(self, rows: Tensor, slope: Tensor, intercept: Tensor) -> None:
        """Of lines with equal slopes keep the lowest (a group with zero scales has many)."""
        by_intercept = intercept.sort(dim=1)[1]
        by_slope = slope.gather(1, by_intercept).sort(dim=1, stable=True)[1]
        order = by_intercept.gather(1, by_slope)
        self.order[rows] = order
        self.slope[rows] = slope.gather(1, order)
        self.intercept[rows] = intercept.gather(1, order)
        keep = torch.ones_like(order, dtype=torch.bool)
        keep[:, 1:] = self.slope[rows, 1:] != self.slope[rows, :-1]
        self._keep(rows, keep)

    def drop_hidden(self, rows: Tensor) -> Tensor:
        """One pass over ``rows``; returns those that changed.

        A point strictly above the chord of its neighbours is on no lower hull, so all such points
        may go at once.
        """
        m, q = self.slope[rows], self.intercept[rows]
        left = (q[:, 1:-1] - q[:, :-2]) * (m[:, 2:] - m[:, 1:-1])
        right = (q[:, 2:] - q[:, 1:-1]) * (m[:, 1:-1] - m[:, :-2])
        position = torch.arange(1, m.shape[1] - 1, device=m.device)
        hidden = (left > right) & (position < (self.size[rows] - 1)[:, None])
        changed = hidden.any(1)
        rows, hidden = rows[changed], hidden[changed]
        if len(rows):
            keep = torch.arange(m.shape[1], device=m.device) < self.size[rows, None]
            keep[:, 1:-1] &= ~hidden
            self._keep(rows, keep)
        return rows

    def _keep(self, rows: Tensor, keep: Tensor) -> None:
        """Move the kept points of ``rows`` to the front and fill up with copies of the last one."""
        size = keep.sum(1)
        source = torch.argsort((~keep).to(torch.uint8), dim=1, stable=True)
        last = source.gather(1, (size - 1)[:, None])
        position = torch.arange(keep.shape[1], device=keep.device)
        source = torch.where(position < size[:, None], source, last)
        for table in (self.slope, self.intercept, self.order):
            table[rows] = table[rows].gather(1, source)
        self.size[rows] = size

    def breakpoints(self) -> Tensor:
        """float32 [n, L - 1]; +inf past the last line of a row."""
        run = self.slope[:, 1:] - self.slope[:, :-1]
        rise = self.intercept[:, 1:] - self.intercept[:, :-1]
        position = torch.arange(run.shape[1], device=run.device)
        present = position < (self.size - 1)[:, None]
        ratio = torch.where(present, rise / (2 * run), torch.inf)
        # Rounding may leave neighbours out of order by an ulp.
        return ratio.cummax(dim=1).values


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
