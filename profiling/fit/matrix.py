# SPDX-License-Identifier: Apache-2.0
"""Expert matrices <-> groups: cutting, padding, packing, and the gain of every tier."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_dpa.kernels.planes import NUM_CHUNKS, NUM_TIERS, num_groups, pack_bits

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
    mask = torch.nn.functional.pad(torch.ones(columns), (0, short)).expand(padded.shape)
    return padded.reshape(-1, group_size), mask.reshape(-1, group_size)


def assemble(weight: Tensor, fit: GroupFit, group_size: int, row_blocks: int) -> MatrixFit:
    """Pack the fit of ``cut_groups(weight)`` for storage and measure it.

    Args:
        weight: [E, N, C], what was fitted.
        row_blocks: matrices stacked in the rows (2 for w13), each with gains of its own.

    The gain makes tier k unbiased: ``gain_k = <W, W> / <W, c_k>``. Least-squares scales shrink the
    decoded weights, and shrinkage adds up coherently over layers while rounding noise averages out.
    """
    experts, rows, columns = weight.shape
    groups = num_groups(columns, group_size)

    def per_weight(values: Tensor) -> Tensor:
        return values.view(experts, rows, groups * group_size)[..., :columns]

    planes = [
        pack_bits(per_weight((fit.codes >> (NUM_CHUNKS - 1 - j)) & 1)) for j in range(NUM_CHUNKS)
    ]
    scales = [s.reshape(experts, rows, groups).contiguous() for s in fit.scale.unbind(1)]
    target = weight.float().unflatten(1, (row_blocks, -1))
    power = (target * target).sum((2, 3), dtype=torch.float64)
    gain = torch.ones(experts, row_blocks, NUM_TIERS, dtype=torch.float64)
    error = torch.zeros(experts, NUM_TIERS, dtype=torch.float64)
    error_with_gain = torch.zeros(experts, NUM_TIERS, dtype=torch.float64)
    for k, values in enumerate(fit.tiers()):
        if k == 0:
            continue
        tier = per_weight(values).unflatten(1, (row_blocks, -1))
        along = (target * tier).sum((2, 3), dtype=torch.float64)
        gain[..., k] = torch.where(along > 0, power / along.clamp_min(1e-300), 1.0)
        scaled = tier * gain[..., k, None, None].float()
        error[:, k] = ((target - tier) ** 2).sum((1, 2, 3), dtype=torch.float64)
        error_with_gain[:, k] = ((target - scaled) ** 2).sum((1, 2, 3), dtype=torch.float64)
    return MatrixFit(
        planes=planes,
        scales=scales,
        offset=fit.offset.reshape(experts, rows, groups).contiguous(),
        gain=gain.float(),
        error=error,
        error_with_gain=error_with_gain,
        power=power.sum(1),
    )
