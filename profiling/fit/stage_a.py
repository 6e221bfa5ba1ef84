# SPDX-License-Identifier: Apache-2.0
"""Stage A: joint alternating fit of all tiers, every column weighted alike.

Needs no calibration. The start decides: from the greedy one-plane-at-a-time start, shared scales end
in a bad local optimum, so both layouts start geometric (scales range/2^j around mid-range).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dpa.kernels.planes import (
    GEOMETRIC,
    MIN_CHUNKS,
    NUM_CHUNKS,
    NUM_TIERS,
    PER_CHUNK,
)

from .codes import best_codes, code_lines, lower_envelope
from .scales import best_geometric_scale, best_scales

# The objective has flattened out by then; more rounds only trade the top tiers for the low ones.
ROUNDS = 10
# Fractions of the half range tried for the geometric scale: clipping outliers serves the low tiers.
CLIPS = tuple(0.5 + 0.05 * i for i in range(11))
# Groups fitted at once: bounds the working set (256 lines per group) to about 100 MB.
BLOCK = 8192
HALVINGS = 2.0 ** -torch.arange(NUM_CHUNKS, dtype=torch.float32)


@dataclass
class GroupFit:
    """The fit of n groups: codes uint8 [n, G] (plane j is bit 7 - j), scale fp16 [n, 8] or [n, 1]
    (geometric), offset fp16 [n]. Scales are never negative."""

    codes: Tensor
    scale: Tensor
    offset: Tensor

    def plane_scales(self) -> Tensor:
        """float32 [n, 8]."""
        scale = self.scale.float()
        return scale if scale.shape[1] == NUM_CHUNKS else scale * HALVINGS.to(scale.device)

    def tiers(self) -> list[Tensor]:
        """Decoded weights at tier 0..8, each float32 [n, G], gain not applied."""
        value = self.offset.float()[:, None].expand(self.codes.shape)
        scale, out = self.plane_scales(), [value]
        for j in range(NUM_CHUNKS):
            sign = ((self.codes >> (NUM_CHUNKS - 1 - j)) & 1).float() * 2 - 1
            value = value + scale[:, j, None] * sign
            out.append(value)
        return out


def tier_weights(weight: Tensor, mask: Tensor, exponent: float) -> Tensor:
    """w_k = E_k^-exponent, normalised; float32 [9], 0 below the lowest tier.

    E_k is the relative error of tier k under plain bit slicing of an 8-bit round to nearest, so that
    exponent 0 weighs absolute errors and exponent 1 weighs every tier's relative error alike.
    """
    only_top = weight.new_zeros(NUM_TIERS)
    only_top[NUM_CHUNKS] = 1.0
    offset, half_range = _mid_and_half_range(weight, mask)
    scale = half_range[:, None] / 2 * HALVINGS.to(weight.device)
    fit = GroupFit(best_codes(weight, offset, scale, only_top), scale, offset)
    power = (mask * weight * weight).sum().clamp_min(torch.finfo(torch.float32).tiny)
    out = weight.new_zeros(NUM_TIERS)
    for k, tier in enumerate(fit.tiers()):
        if k >= MIN_CHUNKS:
            error = (mask * (weight - tier) ** 2).sum() / power
            out[k] = error.clamp_min(1e-12) ** -exponent
    return out / out.sum()


def fit_groups(
    weight: Tensor,
    mask: Tensor,
    weights_of_tiers: Tensor,
    scale_layout: str,
    rounds: int = ROUNDS,
) -> GroupFit:
    """Fit every group on its own.

    Args:
        weight: float32 [n, G].
        mask: float32 [n, G]; 0 where a short group has no column.
        weights_of_tiers: float32 [9].
        scale_layout: ``per_chunk`` or ``geometric``.
        rounds: alternations.
    """
    fit_block = {PER_CHUNK: _fit_per_chunk, GEOMETRIC: _fit_geometric}[scale_layout]
    parts = []
    for begin in range(0, len(weight), BLOCK):
        block = slice(begin, begin + BLOCK)
        parts.append(fit_block(weight[block], mask[block], weights_of_tiers, rounds))
    return GroupFit(
        torch.cat([p.codes for p in parts]),
        torch.cat([p.scale for p in parts]),
        torch.cat([p.offset for p in parts]),
    )


def _fit_per_chunk(weight: Tensor, mask: Tensor, weights_of_tiers: Tensor, rounds: int) -> GroupFit:
    offset, half_range = _mid_and_half_range(weight, mask)
    scale = half_range[:, None] / 2 * HALVINGS.to(weight.device)
    for _ in range(rounds):
        codes = best_codes(weight, offset, scale, weights_of_tiers)
        offset, scale = best_scales(weight, mask, codes, weights_of_tiers)
    # Kernels may assume scales >= 0: the sign goes into the bits of the final code step.
    offset, scale = offset.half(), scale.abs().half()
    codes = best_codes(weight, offset.float(), scale.float(), weights_of_tiers)
    return GroupFit(codes, scale, offset)


def _fit_geometric(weight: Tensor, mask: Tensor, weights_of_tiers: Tensor, rounds: int) -> GroupFit:
    coder = _GeometricCoder(weights_of_tiers)
    middle, half_range = _mid_and_half_range(weight, mask)
    offset, scale = middle.clone(), half_range / 2
    best = torch.full_like(middle, torch.inf)
    for clip in CLIPS:
        trial = clip * half_range / 2
        error = coder.error(weight, mask, middle, trial)
        scale = torch.where(error < best, trial, scale)
        best = torch.minimum(error, best)
    for _ in range(rounds):
        codes = coder.codes(weight, offset, scale)
        offset, scale = best_geometric_scale(weight, mask, codes, weights_of_tiers)
        scale = scale.abs()
    offset, scale = offset.half(), scale.half()
    codes = coder.codes(weight, offset.float(), scale.float())
    return GroupFit(codes, scale[:, None], offset)


class _GeometricCoder:
    """Code step of the geometric layout: one table serves all groups, since the lines of a group
    are those of the unit group, scaled."""

    def __init__(self, weights_of_tiers: Tensor) -> None:
        slope, intercept = code_lines(HALVINGS[None].to(weights_of_tiers.device), weights_of_tiers)
        breakpoints, order = lower_envelope(slope, intercept)
        self._breakpoints, self._order = breakpoints[0].contiguous(), order[0].to(torch.uint8)
        self._moment, self._square = slope[0], intercept[0]
        self._total = weights_of_tiers.sum()

    def codes(self, weight: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
        safe = scale.clamp_min(torch.finfo(torch.float32).tiny)
        unit = (weight - offset[:, None]) / safe[:, None]
        return self._order[torch.searchsorted(self._breakpoints, unit)]

    def error(self, weight: Tensor, mask: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
        """Objective of every group at its best codes, float32 [n]."""
        codes = self.codes(weight, offset, scale).long()
        centred = weight - offset[:, None]
        s = scale[:, None]
        per_weight = (
            self._total * centred * centred
            - 2 * s * centred * self._moment[codes]
            + s * s * self._square[codes]
        )
        return (mask * per_weight).sum(1)


def _mid_and_half_range(weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and half width of the value range of every group, float32 [n] each."""
    absent = mask == 0
    low = weight.masked_fill(absent, torch.inf).amin(1)
    high = weight.masked_fill(absent, -torch.inf).amax(1)
    return (low + high) / 2, (high - low) / 2
