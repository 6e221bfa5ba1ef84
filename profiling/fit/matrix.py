# SPDX-License-Identifier: Apache-2.0
"""Expert matrices <-> groups: cutting, padding, packing, and the gain of every tier."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from vllm_dpa.kernels.planes import GEOMETRIC, NUM_CHUNKS, NUM_TIERS, num_groups, pack_bits

from .stage_a import GroupFit


@dataclass
class MatrixFit:
    """One matrix of all experts of a layer, encoded.

    Attributes:
        planes: 8 tensors uint8 [E, N, ceil(C/8)].
        scales: 8 tensors (``per_chunk``) or 1 (``geometric``), fp16 [E, N, G].
        offset: fp16 [E, N, G].
        gain: fp32 [E, M, 9], M row blocks (2 for w13, 1 for w2).
        error: float64 [E, 9], squared error of tier k, gain not applied; ``error_with_gain`` alike.
        power: float64 [E], sum of squares of the weights.
    """

    planes: list[Tensor]
    scales: list[Tensor]
    offset: Tensor
    gain: Tensor
    error: Tensor
    error_with_gain: Tensor
    power: Tensor


@dataclass
class ErrorSums:
    """Squared errors per tier and the signal power they compare with.

    Attributes:
        error: float64 [9], gain not applied; ``with_gain`` alike, applied.
        power: sum of squares of the weights.
    """

    error: Tensor = field(default_factory=lambda: torch.zeros(NUM_TIERS, dtype=torch.float64))
    with_gain: Tensor = field(default_factory=lambda: torch.zeros(NUM_TIERS, dtype=torch.float64))
    power: float = 0.0

    def add(self, error: Tensor, with_gain: Tensor, power: float) -> None:
        self.error += error
        self.with_gain += with_gain
        self.power += power

    def sqnr_db(self, error: Tensor) -> list[float]:
        """10 log10(signal / error) of tiers 1..8, rounded to 1e-4 dB."""
        power = max(self.power, 1e-300)
        return [round(10 * math.log10(power / max(float(e), 1e-300)), 4) for e in error[1:]]


def cut_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Cut ``[..., C]`` into float32 groups [n, group_size] and their mask (0 for padding)."""
    columns = weight.shape[-1]
    short = num_groups(columns, group_size) * group_size - columns
    padded = torch.nn.functional.pad(weight.float(), (0, short))
    ones = torch.ones(columns, device=weight.device)
    mask = torch.nn.functional.pad(ones, (0, short)).expand(padded.shape)
    return padded.reshape(-1, group_size), mask.reshape(-1, group_size)


@dataclass
class MatrixCode:
    """E matrices [N, C] as codes and scales of G groups of columns.

    Attributes:
        codes: uint8 [E, N, C]; plane j is bit 7 - j.
        scale: float32 [E, N, G, 8], never negative; values that fp16 holds (in the geometric layout
            those of plane 0, halved from plane to plane).
        offset: float32 [E, N, G], values that fp16 holds.
        group_size: columns of a group; the last one may be short.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    group_size: int

    @classmethod
    def of_groups(cls, fit: GroupFit, shape: torch.Size, group_size: int) -> Self:
        """From the fit of ``cut_groups(weight)`` of a weight of this shape, [E, N, C]."""
        experts, rows, columns = shape
        groups = (experts, rows, num_groups(columns, group_size))
        return cls(
            fit.codes.view(experts, rows, -1)[..., :columns].contiguous(),
            fit.plane_scales().view(*groups, NUM_CHUNKS),
            fit.offset.float().view(groups),
            group_size,
        )

    def expert(self, index: int) -> Self:
        """The code of one of the matrices, E = 1."""
        one = slice(index, index + 1)
        return type(self)(self.codes[one], self.scale[one], self.offset[one], self.group_size)

    @classmethod
    def stack(cls, codes: list[Self]) -> Self:
        """Codes of equal shape as one."""
        parts = ("codes", "scale", "offset")
        joined = [torch.cat([getattr(code, part) for code in codes]) for part in parts]
        return cls(joined[0], joined[1], joined[2], codes[0].group_size)

    def group(self, g: int) -> slice:
        """Columns of group ``g``."""
        first = g * self.group_size
        return slice(first, min(first + self.group_size, self.codes.shape[-1]))

    def tiers(self) -> Iterator[Tensor]:
        """Decoded weights at tier 1..8, each float32 [E, N, C], gain not applied."""

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(self.group_size, -1)[..., : self.codes.shape[-1]]

        value = spread(self.offset)
        for j in range(NUM_CHUNKS):
            sign = ((self.codes >> (NUM_CHUNKS - 1 - j)) & 1).float() * 2 - 1
            value = value + spread(self.scale[..., j]) * sign
            yield value


def assemble(
    weight: Tensor,
    code: MatrixCode,
    scale_layout: str,
    row_blocks: int,
    hessian: Tensor | None = None,
) -> MatrixFit:
    """Pack a code of ``weight`` for storage and measure it.

    Args:
        weight: float32 [E, N, C], what was fitted.
        code: its code.
        scale_layout: ``per_chunk`` or ``geometric``.
        row_blocks: matrices stacked in the rows (2 for w13), each with gains of its own.
        hessian: float32 [E, C, C], E[x x^T] of the inputs; the identity without it.

    The gain makes the outputs of tier k unbiased: ``gain_k = <W, W>_H / <W, c_k>_H``. Least-squares
    scales shrink the decoded weights, and shrinkage adds up coherently over layers while rounding
    noise averages out. The errors are those of the weights, whatever the Hessian.
    """
    experts = weight.shape[0]

    def blocks(values: Tensor) -> Tensor:
        return values.unflatten(1, (row_blocks, -1))

    planes = [pack_bits((code.codes >> (NUM_CHUNKS - 1 - j)) & 1) for j in range(NUM_CHUNKS)]
    stored = code.scale[..., :1] if scale_layout == GEOMETRIC else code.scale
    target = blocks(weight)
    probe = target if hessian is None else blocks(weight @ hessian)
    power = (target * target).sum((1, 2, 3), dtype=torch.float64)
    along_itself = (probe * target).sum((2, 3), dtype=torch.float64)
    gain = torch.ones(experts, row_blocks, NUM_TIERS, dtype=torch.float64, device=weight.device)
    error = gain.new_zeros(experts, NUM_TIERS)
    error_with_gain = error.clone()
    for k, values in enumerate(code.tiers(), start=1):
        tier = blocks(values)
        along = (probe * tier).sum((2, 3), dtype=torch.float64)
        gain[..., k] = torch.where(along > 0, along_itself / along.clamp_min(1e-300), 1.0)
        scaled = tier * gain[..., k, None, None].float()
        error[:, k] = ((target - tier) ** 2).sum((1, 2, 3), dtype=torch.float64)
        error_with_gain[:, k] = ((target - scaled) ** 2).sum((1, 2, 3), dtype=torch.float64)
    return MatrixFit(
        planes=[plane.cpu() for plane in planes],
        scales=[scale.half().cpu().contiguous() for scale in stored.unbind(-1)],
        offset=code.offset.half().cpu(),
        gain=gain.float().cpu(),
        error=error.cpu(),
        error_with_gain=error_with_gain.cpu(),
        power=power.cpu(),
    )
