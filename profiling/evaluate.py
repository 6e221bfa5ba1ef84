# SPDX-License-Identifier: Apache-2.0
"""Quality of an encoded model against full precision: KL, perplexity, bytes read per token."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from vllm_dpa.allocation import LayerCost, budget_of
from vllm_dpa.checkpoint import CheckpointReader, LayerShape
from vllm_dpa.kernels import dispatch
from vllm_dpa.kernels.cpu.packed import PackedLayer
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_CHUNKS, NUM_TIERS
from vllm_dpa.profiling.reference_model import ExpertsForward, ReferenceModel
from vllm_dpa.settings import Activations, CheckpointSettings, Mode, Scope

BATCH_WINDOWS = 16


class EvaluateOptions(BaseModel):
    """What to evaluate.

    Attributes:
        modes: allocator modes.
        k_bars: budgets.
        scope: ``dispatch`` or ``token``.
        dispatch_tokens: consecutive tokens that form one dispatch. In scope ``token`` it does not
            change the result, only how many tokens share the bytes read.
        activations: how the CPU kernel rounds activations, ``int8`` or ``int16``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    modes: tuple[Mode, ...] = ("uniform", "dpa")
    k_bars: tuple[Annotated[float, Field(ge=MIN_CHUNKS, le=NUM_CHUNKS)], ...] = (2.0, 3.0, 4.0)
    scope: Scope = "dispatch"
    dispatch_tokens: Annotated[int, Field(ge=1)] = 16
    activations: Activations = "int8"


class Row(BaseModel):
    """One point of the frontier.

    Attributes:
        kl: mean over tokens of KL(full precision || encoded), nats.
        kl_ci95: half width of its 95 % interval, over sequences; null with a single sequence.
        perplexity: of the encoded model on the text.
        bytes_read_per_token: expert bytes that the dispatches need, each active expert read once
            per dispatch up to the largest k asked of it, divided by the tokens.
    """

    mode: Mode
    scope: Scope
    dispatch_tokens: int
    k_bar: float
    kl: float
    kl_ci95: float | None
    perplexity: float
    bytes_read_per_token: float


@dataclass
class Report:
    tokens: int
    reference_perplexity: float
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "reference_perplexity": self.reference_perplexity,
            "rows": [row.model_dump() for row in self.rows],
        }


@dataclass
class _Layer:
    """One MoE layer computed from its chunks by the serving kernels."""

    shape: LayerShape
    settings: CheckpointSettings
    experts: PackedLayer
    cost: LayerCost
    options: EvaluateOptions
    bytes_read: float = 0.0

    def forward_at(self, mode: Mode, k_bar: float) -> ExpertsForward:
        budget = budget_of(
            self.cost, torch.tensor([k_bar], dtype=torch.float32), mode, self.options.scope
        )

        def forward(hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            # In scope token a dispatch does not change the counts, so all tokens go at once.
            size = len(ids) if self.options.scope == "token" else self.options.dispatch_tokens
            counts = torch.zeros_like(ids)
            for part in torch.arange(len(ids)).split(size):
                k = dispatch.allocate(gates[part], ids[part], budget)
                counts[part] = k[ids[part]] if k.dim() == 1 else k
            self._count_bytes(ids, counts)
            return dispatch.fused_moe(
                hidden, self.experts, gates, ids, counts, self.options.activations
            )

        return forward

    def _count_bytes(self, ids: Tensor, counts: Tensor) -> None:
        part = torch.arange(len(ids)) // self.options.dispatch_tokens
        deepest = torch.zeros(int(part[-1]) + 1, self.shape.num_experts, dtype=torch.int64)
        index = part[:, None] * self.shape.num_experts + ids
        deepest.view(-1).scatter_reduce_(0, index.flatten(), counts.flatten(), "amax")
        for k, experts in enumerate(torch.bincount(deepest.flatten(), minlength=NUM_TIERS)):
            if k:
                self.bytes_read += int(experts) * self.shape.expert_bytes(k, self.settings)


@dataclass
class _Sums:
    """Per-sequence sums of one configuration."""

    kl: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    bytes_read: float = 0.0


def evaluate(
    checkpoint: CheckpointReader,
    reference: ReferenceModel,
    windows: Tensor,
    options: EvaluateOptions,
    advance: Callable[[int], None] | None = None,
) -> Report:
    """Compare the encoded model with the reference, through the serving allocator and kernels.

    Args:
        checkpoint: the encoded model, with all chunks.
        reference: the model it was encoded from.
        windows: token ids of held-out text, int64 [W, window].
        options: modes, budgets and dispatches.
        advance: called with the number of (window, row) pairs done, for progress.

    Raises:
        DpaError: the reference does not fit, or a mode needs residuals that the checkpoint does not
            have.
    """
    layers = _load_layers(checkpoint, options)
    shapes = [layer.shape for layer in layers]
    sums = {(mode, k_bar): _Sums() for mode in options.modes for k_bar in options.k_bars}
    reference_nll: list[float] = []
    for batch in windows.split(BATCH_WINDOWS):
        exact = reference.logits(batch).log_softmax(-1)
        reference_nll += _nll(exact, batch)
        for (mode, k_bar), total in sums.items():
            forwards = {layer.shape.prefix: layer.forward_at(mode, k_bar) for layer in layers}
            with reference.replaced_experts(forwards, shapes):
                ours = reference.logits(batch).log_softmax(-1)
            total.kl += (exact.exp() * (exact - ours)).sum(-1).mean(1).tolist()
            total.nll += _nll(ours, batch)
            for layer in layers:
                total.bytes_read += layer.bytes_read
                layer.bytes_read = 0.0
            if advance is not None:
                advance(len(batch))
    rows = [
        _row(mode, k_bar, total, options, windows.numel()) for (mode, k_bar), total in sums.items()
    ]
    return Report(windows.numel(), _perplexity(reference_nll), rows)


def _load_layers(checkpoint: CheckpointReader, options: EvaluateOptions) -> list[_Layer]:
    for mode in options.modes:
        if mode in ("dpa", "residual_only"):
            checkpoint.require_residuals(mode)
    residuals = checkpoint.residuals()
    return [
        _Layer(
            layer,
            checkpoint.settings,
            PackedLayer.of_stacks(*checkpoint.read_layer(layer.prefix)),
            LayerCost.of_layer(residuals, index, layer.num_experts, NUM_CHUNKS),
            options,
        )
        for index, layer in enumerate(checkpoint.manifest.layers)
    ]


def _nll(log_probs: Tensor, ids: Tensor) -> list[float]:
    """Mean negative log-likelihood of every sequence's next tokens."""
    picked = log_probs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return (-picked.mean(1)).tolist()


def _perplexity(nll: list[float]) -> float:
    return math.exp(sum(nll) / len(nll))


def _row(mode: Mode, k_bar: float, total: _Sums, options: EvaluateOptions, tokens: int) -> Row:
    kl = torch.tensor(total.kl, dtype=torch.float64)
    half_width = float(1.96 * kl.std() / math.sqrt(len(kl))) if len(kl) > 1 else None
    return Row(
        mode=mode,
        scope=options.scope,
        dispatch_tokens=options.dispatch_tokens,
        k_bar=k_bar,
        kl=float(kl.mean()),
        kl_ci95=half_width,
        perplexity=_perplexity(total.nll),
        bytes_read_per_token=total.bytes_read / tokens,
    )
