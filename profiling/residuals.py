# SPDX-License-Identifier: Apache-2.0
"""Residual profiling: R[layer, expert, k], the gate-free output error of every expert at k chunks.

R is the mean over the expert's own routed calibration tokens, and over the output's elements, of the
squared difference between the expert's output at tier k and at full precision.
"""

from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import linear, silu

from vllm_dpa.allocation import lower_convex_hull
from vllm_dpa.checkpoint import CheckpointReader, Residuals
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_TIERS, PlaneStack
from vllm_dpa.kernels.tier_decoder import TierDecoder
from vllm_dpa.profiling.calibration import LayerInputs
from vllm_dpa.profiling.fitters import CalibrationData
from vllm_dpa.profiling.layer_fit import Advance, one_thread_each
from vllm_dpa.profiling.source import SourceCheckpoint


class ProfileOptions(BaseModel):
    """What to profile on.

    Attributes:
        tokens_per_expert: of an expert's routed tokens, the first so many are measured.
        fallback_tokens: an expert without routed tokens is measured on this many of its layer's
            tokens, evenly spaced, and recorded as a fallback.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens_per_expert: Annotated[int, Field(ge=1)] = 256
    fallback_tokens: Annotated[int, Field(ge=1)] = 64


def profile(
    checkpoint: CheckpointReader,
    source: SourceCheckpoint,
    calibration: CalibrationData,
    options: ProfileOptions,
    advance: Advance | None = None,
) -> tuple[Residuals, dict[str, Any]]:
    """Measure the residual table, one layer in memory at a time.

    Args:
        checkpoint: the encoded model, with all chunks.
        source: the model it was encoded from.
        calibration: what its experts see.
        options: how many of their tokens are measured.
        advance: called with the number of experts done, for progress.

    Returns:
        The table and its record for the manifest: options, calibration, fallback experts, and how far
        its lower convex hull, which the allocator uses, is from it.

    Raises:
        DpaError: ``source`` is not the model that was encoded.
    """
    layers = checkpoint.manifest.layers
    if source.layers != layers:
        raise DpaError(
            f"{source.path} has other MoE layers than {checkpoint.path}; is it the model that was "
            "encoded?"
        )
    num_experts = max(layer.num_experts for layer in layers)
    r = torch.zeros(len(layers), num_experts, NUM_TIERS)
    stderr = torch.zeros_like(r)
    counts = torch.zeros(len(layers), num_experts, dtype=torch.int64)
    fallback: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        inputs = calibration.inputs(layer.prefix)
        w13, w2 = checkpoint.read_layer(layer.prefix)
        counts[i, : layer.num_experts] = inputs.counts()
        alone = [e for e in range(layer.num_experts) if counts[i, e] == 0]
        if alone:
            fallback[layer.prefix] = alone

        def measure(expert: int, prefix: str = layer.prefix) -> tuple[Tensor, Tensor]:
            x = _tokens_of(inputs, expert, options)  # noqa: B023 (used within the loop)
            exact = source.expert(prefix, expert)
            return _expert_residual(x, exact, w13, w2, expert)  # noqa: B023

        with one_thread_each(torch.device("cpu")) as run:
            for expert, (mean, error) in enumerate(run(measure, range(layer.num_experts))):
                r[i, expert], stderr[i, expert] = mean, error
                if advance is not None:
                    advance(1)
    record = {
        **options.model_dump(),
        "calibration": calibration.identity(),
        "min_count": min(
            int(row[: la.num_experts].min()) for la, row in zip(layers, counts, strict=True)
        ),
        "fallback_experts": fallback,
        **_hull_record(r),
    }
    return Residuals(r, counts, stderr), record


def _tokens_of(inputs: LayerInputs, expert: int, options: ProfileOptions) -> Tensor:
    """Inputs [n, H] that an expert is measured on."""
    tokens = torch.nonzero((inputs.ids == expert).any(1))[:, 0]
    if len(tokens) == 0:
        last = len(inputs.hidden) - 1
        tokens = torch.linspace(0, last, options.fallback_tokens).long().unique()
    return inputs.hidden[tokens[: options.tokens_per_expert]]


def _hull_record(r: Tensor) -> dict[str, Any]:
    """How the table differs from its hull: entries that the hull lowers, and by how much at most."""
    table = r[..., MIN_CHUNKS:].flatten(0, 1)
    hull = lower_convex_hull(r.flatten(0, 1))[:, MIN_CHUNKS:]
    lowered = 1 - hull / table.clamp_min(1e-30)
    return {
        "hull_lowers_entries": int((hull < table).sum()),
        "hull_lowers_at_most": float(lowered.clamp_min(0).max()),
        "rising_entries": int((table.diff(dim=1) > 0).sum()),
    }


@torch.inference_mode()
def _expert_residual(
    x: Tensor, weights: tuple[Tensor, Tensor], w13: PlaneStack, w2: PlaneStack, expert: int
) -> tuple[Tensor, Tensor]:
    """R of one expert on inputs x [n, H] and its standard error over tokens, fp32 [9] each; 0 below
    the lowest tier, and no error from a single token."""

    def output(gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        return linear(silu(gate) * up, down)

    exact = output(*weights)
    mean, error = torch.zeros(2, NUM_TIERS)
    gate_up, down = TierDecoder(w13, expert), TierDecoder(w2, expert)
    for k in range(MIN_CHUNKS, NUM_TIERS):
        per_token = (output(gate_up.advance(k), down.advance(k)) - exact).square().mean(1)
        mean[k] = per_token.mean()
        if len(x) > 1:
            error[k] = per_token.std() / len(x) ** 0.5
    return mean, error
