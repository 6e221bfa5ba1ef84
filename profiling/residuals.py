# SPDX-License-Identifier: Apache-2.0
"""Residual profiling: R[layer, expert, k], the gate-free output error of every expert at k chunks.

R is the mean over the expert's own routed calibration tokens, and over the output's elements, of the
squared difference between the expert's output at tier k and at full precision.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import linear, silu

from vllm_dpa.checkpoint import CheckpointReader, LayerShape, Residuals
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_TIERS, PlaneStack
from vllm_dpa.kernels.tier_decoder import TierDecoder
from vllm_dpa.profiling.reference_model import ReferenceModel

BATCH_WINDOWS = 8


class ProfileOptions(BaseModel):
    """What to profile on.

    Attributes:
        max_tokens: calibration tokens to run through the model.
        window: tokens per sequence.
        tokens_per_expert: of an expert's routed tokens, the first so many are measured.
        fallback_tokens: an expert without routed tokens is measured on this many of its layer's
            tokens, evenly spaced, and recorded as a fallback.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: Annotated[int, Field(ge=1)] = 8192
    window: Annotated[int, Field(ge=2)] = 256
    tokens_per_expert: Annotated[int, Field(ge=1)] = 256
    fallback_tokens: Annotated[int, Field(ge=1)] = 64


def profile(
    checkpoint: CheckpointReader,
    reference: ReferenceModel,
    text: Path,
    options: ProfileOptions,
    advance: Callable[[int], None] | None = None,
) -> tuple[Residuals, dict[str, Any]]:
    """Measure the residual table.

    Args:
        checkpoint: the encoded model, with all chunks.
        reference: the model it was encoded from.
        text: calibration text.
        options: how much of it.
        advance: called with the number of experts done, for progress.

    Returns:
        The table and its record for the manifest: options, counts summary, fallback experts.

    Raises:
        DpaError: the reference does not fit, or the text is too short.
    """
    layers = checkpoint.manifest.layers
    windows = reference.windows(text, options.window, options.max_tokens)
    routed = _route(reference, layers, windows)
    num_experts = max(layer.num_experts for layer in layers)
    r = torch.zeros(len(layers), num_experts, NUM_TIERS)
    counts = torch.zeros(len(layers), num_experts, dtype=torch.int64)
    fallback: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        hidden, ids = routed.pop(layer.prefix)
        w13, w2 = checkpoint.read_layer(layer.prefix)
        module = reference.experts_module(layer)
        for expert in range(layer.num_experts):
            tokens = torch.nonzero((ids == expert).any(1))[:, 0]
            counts[i, expert] = len(tokens)
            if len(tokens) == 0:
                fallback.setdefault(layer.prefix, []).append(expert)
                tokens = torch.linspace(0, len(hidden) - 1, options.fallback_tokens).long().unique()
            x = hidden[tokens[: options.tokens_per_expert]]
            r[i, expert] = _expert_residual(x, module, w13, w2, expert)
            if advance is not None:
                advance(1)
    record = {
        **options.model_dump(),
        "calibration_tokens": windows.numel(),
        "min_count": int(counts.min()),
        "fallback_experts": fallback,
    }
    return Residuals(r, counts), record


def _route(
    reference: ReferenceModel, layers: list[LayerShape], windows: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer prefix -> (inputs of its experts float32 [T, H], expert ids int64 [T, K])."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {layer.prefix: [] for layer in layers}

    def record(prefix: str) -> Callable[..., None]:
        def hook(module: object, args: tuple[Tensor, ...]) -> None:
            seen[prefix].append((args[0].detach().clone(), args[1].detach().clone()))

        return hook

    hooks = [
        reference.experts_module(layer).register_forward_pre_hook(record(layer.prefix))
        for layer in layers
    ]
    try:
        for batch in windows.split(BATCH_WINDOWS):
            reference.logits(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        prefix: (torch.cat([x for x, _ in parts]), torch.cat([ids for _, ids in parts]))
        for prefix, parts in seen.items()
    }


@torch.inference_mode()
def _expert_residual(
    x: Tensor, module: Any, w13: PlaneStack, w2: PlaneStack, expert: int
) -> Tensor:
    """R of one expert on inputs x [n, H], fp32 [9]; 0 below the lowest tier."""

    def output(gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        return linear(silu(gate) * up, down)

    exact = output(module.gate_up_proj[expert], module.down_proj[expert])
    out = torch.zeros(NUM_TIERS)
    gate_up, down = TierDecoder(w13, expert), TierDecoder(w2, expert)
    for k in range(MIN_CHUNKS, NUM_TIERS):
        out[k] = (output(gate_up.advance(k), down.advance(k)) - exact).square().mean()
    return out
