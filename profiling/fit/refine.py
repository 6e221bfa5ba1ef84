# SPDX-License-Identifier: Apache-2.0
"""Stage C: gradient refinement of an expert's scales and offsets on its outputs; codes stay.

The loss of a step is the error of the full tier plus that of one random lower tier, each over what it
was before, so that the top is reconstructed and every tier is protected:

    L = e_8 / E_8 + e_k / E_k,   e_k = |expert_k(x) - expert(x)|^2 summed over a batch of tokens.

A change is kept only if it lowers the error of all tiers together, weighed as in the fit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from vllm_dpa.kernels.planes import GEOMETRIC, MIN_CHUNKS, NUM_CHUNKS, NUM_TIERS

from .codes import sign_table
from .matrix import MatrixCode
from .stage_a import HALVINGS

STEPS = 100
BATCH = 256
RATE = 3e-3
TIERS = range(MIN_CHUNKS, NUM_TIERS)


class _Trained(torch.nn.Module):
    """One matrix [N, C] with trainable scales and offsets.

    Scales are trained in their logarithm, relative to where they start: they stay positive and a step
    means the same for every group. Offsets move in units of the group's first scale.
    """

    def __init__(self, code: MatrixCode, scale_layout: str) -> None:
        super().__init__()
        self._code, self._geometric = code, scale_layout == GEOMETRIC
        signs = sign_table(code.codes.device)[code.codes[0].long()]
        short = code.offset.shape[-1] * code.group_size - code.codes.shape[-1]
        padded = torch.nn.functional.pad(signs, (0, 0, 0, short))
        self._signs = padded.unflatten(1, (-1, code.group_size))  # [N, G, group, 8]
        scale = code.scale[0]
        self.log_scale = torch.nn.Parameter(
            torch.zeros_like(scale[..., : 1 if self._geometric else 8])
        )
        self.shift = torch.nn.Parameter(torch.zeros_like(code.offset[0]))

    def side(self) -> tuple[Tensor, Tensor]:
        """(scale [N, G, 8], offset [N, G])."""
        scale = self._code.scale[0]
        offset = self._code.offset[0] + self.shift * scale[..., 0]
        return scale * self.log_scale.exp(), offset

    def tier(self, k: int) -> Tensor:
        """Decoded weights at tier k, float32 [N, C]."""
        scale, offset = self.side()
        values = (self._signs[..., :k] @ scale[..., :k, None])[..., 0] + offset[..., None]
        return values.flatten(1)[:, : self._code.codes.shape[-1]]

    @torch.no_grad()
    def stored(self) -> MatrixCode:
        """The code with its scales as fp16 holds them."""
        scale, offset = self.side()
        if self._geometric:
            scale = scale[..., :1].half().float() * HALVINGS.to(scale.device)
        else:
            scale = scale.half().float()
        code = self._code
        return MatrixCode(code.codes, scale[None], offset.half().float()[None], code.group_size)


@dataclass(frozen=True)
class _Target:
    """Tokens of one expert, how much each counts, and the outputs to reach."""

    x: Tensor
    weight: Tensor
    output: Tensor

    def error(self, w13: Tensor, w2: Tensor, rows: Tensor) -> Tensor:
        gate, up = linear(self.x[rows], w13).chunk(2, dim=-1)
        difference = linear(silu(gate) * up, w2) - self.output[rows]
        return (self.weight[rows] * difference.square().sum(-1)).sum()


def refine(
    weights: tuple[Tensor, Tensor],
    codes: tuple[MatrixCode, MatrixCode],
    x: Tensor,
    token_weights: Tensor,
    tier_weights: Tensor,
    scale_layout: str,
    seed: int,
) -> tuple[MatrixCode, MatrixCode]:
    """Refine one expert.

    Args:
        weights: float32 w13 [2I, H] and w2 [H, I].
        codes: their codes, E = 1.
        x: float32 [n, H], the expert's calibration tokens.
        token_weights: float32 [n].
        tier_weights: float32 [9], by which a change is judged.
        scale_layout: ``per_chunk`` or ``geometric``.
        seed: of the batches and tiers.

    Returns:
        New codes, or ``codes`` where nothing was gained.
    """
    gate, up = linear(x, weights[0]).chunk(2, dim=-1)
    target = _Target(x, token_weights, linear(silu(gate) * up, weights[1]))
    generator = torch.Generator().manual_seed(seed)
    first, second = (_Trained(code, scale_layout) for code in codes)
    everything = torch.arange(len(x), device=x.device)
    with torch.no_grad():
        before = _errors(target, codes, everything)
    optimiser = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        rows = torch.randint(0, len(x), (min(BATCH, len(x)),), generator=generator).to(x.device)
        k = int(torch.randint(MIN_CHUNKS, NUM_CHUNKS, (1,), generator=generator))
        loss = x.new_zeros(())
        for tier in (k, NUM_CHUNKS):
            error = target.error(first.tier(tier), second.tier(tier), rows)
            loss = loss + error / before[tier].clamp_min(1e-30) * (len(x) / len(rows))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    after_codes = (first.stored(), second.stored())
    with torch.no_grad():
        after = _errors(target, after_codes, everything)
    return after_codes if after @ tier_weights < before @ tier_weights else codes


def _errors(target: _Target, codes: tuple[MatrixCode, MatrixCode], rows: Tensor) -> Tensor:
    """Errors of tiers 0..8, float32 [9]; 0 below the lowest."""
    tiers = list(zip(codes[0].tiers(), codes[1].tiers(), strict=True))
    out = rows.new_zeros(NUM_TIERS, dtype=torch.float32)
    for k in TIERS:
        w13, w2 = tiers[k - 1]
        out[k] = target.error(w13[0], w2[0], rows)
    return out
