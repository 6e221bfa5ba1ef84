# SPDX-License-Identifier: Apache-2.0
"""The encoder's methods: stage A needs the weights alone, stage B calibration data too."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from vllm_dpa.checkpoint import LayerShape
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_TIERS
from vllm_dpa.profiling.calibration import LayerInputs
from vllm_dpa.profiling.codec import SWEEPS, SharedScale
from vllm_dpa.profiling.fit.matrix import MatrixCode
from vllm_dpa.profiling.fit.refine import STEPS, refine
from vllm_dpa.profiling.fit.stage_a import BLOCK
from vllm_dpa.profiling.layer_fit import (
    Advance,
    EncodeOptions,
    ExpertFit,
    LayerFit,
    LayerWeights,
    fit_blocks,
)

CPU = torch.device("cpu")


def stack_experts(weights: LayerWeights, members: range, device: torch.device) -> list[Tensor]:
    """w13 [E, 2I, H] and w2 [E, H, I] of a block of experts, float32 on ``device``."""
    pairs = [weights.expert(e) for e in members]
    return [torch.stack(matrices).to(device) for matrices in zip(*pairs, strict=True)]


@dataclass
class StageA:
    """Joint alternating fit without calibration; the gains are unbiased in weight space."""

    device: torch.device = CPU
    name: str = "stage_a"

    def fit(self, weights: LayerWeights, options: EncodeOptions, advance: Advance) -> LayerFit:
        codec = SharedScale(options, weights.tier_weights(options).to(self.device))

        def fit_block(members: range) -> ExpertFit:
            matrices = stack_experts(weights, members, self.device)
            fits = [codec.pack(m, codec.fit(m, None), 2 - i, None) for i, m in enumerate(matrices)]
            return ExpertFit(fits[0], fits[1])

        return fit_blocks(weights, options, fit_block, 1, self.device, advance)

    def identity(self) -> dict[str, Any]:
        return {}

    def working_bytes(self, shape: LayerShape, options: EncodeOptions) -> int:
        return _workers(self.device) * _stage_a_bytes(shape, options)


# Of an expert's calibration tokens, how many its output error is measured on.
ERROR_TOKENS = 256
# Elements of the largest tensor, [E, N, 256, 8], where experts are fitted in one batch.
BATCH_ELEMENTS = 2**31


class CalibrationData(Protocol):
    """What stage B needs of :class:`~.calibration.Calibration`."""

    def inputs(self, prefix: str) -> LayerInputs: ...
    def identity(self) -> dict[str, Any]: ...
    def working_bytes(self, shape: LayerShape) -> int: ...


@dataclass
class StageB:
    """Coordinate descent under the Hessian of every expert's own inputs, from a short stage A; the
    gains are unbiased in output space.

    Attributes:
        calibration: what the experts see.
        device: where to compute.
        refined: stage C after it, see :mod:`.fit.refine`.
    """

    calibration: CalibrationData
    device: torch.device = CPU
    refined: bool = False
    name: str = "stage_b"

    def fit(self, weights: LayerWeights, options: EncodeOptions, advance: Advance) -> LayerFit:
        inputs = self.calibration.inputs(weights.shape.prefix)
        codec = SharedScale(options, weights.tier_weights(options).to(self.device))

        def fit_block(members: range) -> ExpertFit:
            matrices = stack_experts(weights, members, self.device)
            tokens = [inputs.of_expert(e) for e in members]
            hidden = [(x.to(self.device), w.to(self.device)) for x, w in tokens]
            inner = [
                (_intermediate(x, m), w) for (x, w), m in zip(hidden, matrices[0], strict=True)
            ]
            hessians = [
                torch.stack([damped_hessian(*rows) for rows in part]) for part in (hidden, inner)
            ]
            codes = [codec.fit(m, h) for m, h in zip(matrices, hessians, strict=True)]
            if self.refined:
                codes = _refine(matrices, codes, hidden, codec, members.start)
            parts = zip(matrices, codes, hessians, strict=True)
            fits = [codec.pack(m, code, 2 - i, h) for i, (m, code, h) in enumerate(parts)]
            error = _output_errors(hidden, matrices, codes, [f.gain for f in fits])
            return ExpertFit(fits[0], fits[1], error)

        block = self._block(weights.shape)
        fit = fit_blocks(weights, options, fit_block, block, self.device, advance)
        fit.notes["calibration"] = inputs.record()
        return fit

    def _block(self, shape: LayerShape) -> int:
        if self.device.type == "cpu":
            return 1
        rows = max(2 * shape.intermediate_size, shape.hidden_size)
        return max(1, BATCH_ELEMENTS // (rows * 256 * 8))

    def identity(self) -> dict[str, Any]:
        return {
            "calibration": self.calibration.identity(),
            "damping": DAMPING,
            "sweeps": SWEEPS,
            "refine_steps": STEPS if self.refined else 0,
        }

    def working_bytes(self, shape: LayerShape, options: EncodeOptions) -> int:
        """The calibration tokens, and per worker the tier errors, one group's gradients and the
        Hessians in float32."""
        weights = 3 * shape.hidden_size * shape.intermediate_size
        hessians = shape.hidden_size**2 + shape.intermediate_size**2
        fields = 4 * (3 * 7 * weights + 2 * hessians)
        worker = max(fields, _stage_a_bytes(shape, options))
        workers = _workers(self.device) * self._block(shape)
        return self.calibration.working_bytes(shape) + workers * worker


# Of the mean diagonal, added to a Hessian: a hundredth of a typical input's energy.
DAMPING = 0.01


def damped_hessian(inputs: Tensor, weights: Tensor) -> Tensor:
    """``E[x x^T]`` plus damping.

    Args:
        inputs: float32 [n, C].
        weights: float32 [n], not negative, how much each row counts.

    Returns:
        float32 [C, C]; a multiple of the identity where all inputs are 0.
    """
    scaled = inputs * (weights / weights.sum().clamp_min(1e-30))[:, None]
    hessian = scaled.T @ inputs
    level = hessian.diagonal().mean()
    level = torch.where(level > 0, DAMPING * level, torch.ones_like(level))
    hessian.diagonal().add_(level)
    return (hessian + hessian.T) / 2


def _intermediate(hidden: Tensor, w13: Tensor) -> Tensor:
    gate, up = linear(hidden, w13).chunk(2, dim=-1)
    return silu(gate) * up


def _refine(
    matrices: list[Tensor],
    codes: list[MatrixCode],
    hidden: list[tuple[Tensor, Tensor]],
    codec: SharedScale,
    seed: int,
) -> list[MatrixCode]:
    """Stage C, expert by expert; an error in the output counts as often as the gate squared."""
    refined = [
        refine(
            (matrices[0][i], matrices[1][i]),
            (codes[0].expert(i), codes[1].expert(i)),
            x,
            w * w,
            codec.tier_weights,
            codec.options.scale_layout,
            seed + i,
        )
        for i, (x, w) in enumerate(hidden)
    ]
    return [MatrixCode.stack(list(part)) for part in zip(*refined, strict=True)]


def _output_errors(
    hidden: list[tuple[Tensor, Tensor]],
    matrices: list[Tensor],
    codes: list[MatrixCode],
    gains: list[Tensor],
) -> Tensor:
    """Relative squared output error of every expert at every tier, float64 [E, 9]."""
    w13, w2 = matrices
    out = torch.zeros(len(hidden), NUM_TIERS, dtype=torch.float64)
    tiers = zip(codes[0].tiers(), codes[1].tiers(), strict=True)
    samples = [x[:: max(1, len(x) // ERROR_TOKENS)][:ERROR_TOKENS] for x, _ in hidden]
    exact = [linear(_intermediate(x, w13[i]), w2[i]) for i, x in enumerate(samples)]
    for k, (first, second) in enumerate(tiers, start=1):
        if k < MIN_CHUNKS:
            continue
        for i, x in enumerate(samples):
            gate_up = first[i].unflatten(0, (2, -1)) * gains[0][i, :, k, None, None].to(x.device)
            down = second[i] * gains[1][i, 0, k].to(x.device)
            y = linear(_intermediate(x, gate_up.flatten(0, 1)), down)
            power = exact[i].square().sum(dtype=torch.float64).clamp_min(1e-300)
            out[i, k] = ((y - exact[i]).square().sum(dtype=torch.float64) / power).cpu()
    return out


def _workers(device: torch.device) -> int:
    return torch.get_num_threads() if device.type == "cpu" else 1


def _stage_a_bytes(shape: LayerShape, options: EncodeOptions) -> int:
    """One expert in float32 with its code, and the tables of 256 lines of a block of groups."""
    weights = 3 * shape.hidden_size * shape.intermediate_size
    return 4 * 4 * weights + BLOCK * 256 * 4 * 10
