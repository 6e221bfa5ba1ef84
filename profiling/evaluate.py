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
        dispatch_tokens: numbers of consecutive tokens that form one dispatch. In scope ``token`` they
            do not change the result, only how many tokens share the bytes read.
        activations: how the CPU kernel rounds activations, ``int8`` or ``int16``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    modes: tuple[Mode, ...] = ("uniform", "dpa")
    k_bars: tuple[Annotated[float, Field(ge=MIN_CHUNKS, le=NUM_CHUNKS)], ...] = (2.0, 3.0, 4.0)
    scope: Scope = "dispatch"
    dispatch_tokens: tuple[Annotated[int, Field(ge=1)], ...] = (16,)
    activations: Activations = "int8"


class Row(BaseModel):
    """One point of the frontier.

    Attributes:
        kl: mean over tokens of KL(full precision || encoded), nats.
        kl_ci95: half width of its 95 % interval, over sequences; null with a single sequence.
        perplexity: of the encoded model on the text.
        top1_agreement: share of tokens after which both models think the same next token likeliest.
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
    top1_agreement: float
    bytes_read_per_token: float


@dataclass
class Allocation:
    """Where the chunks of one configuration went.

    Attributes:
        by_rank: int64 [K, 9], pairs of token and expert by gate rank (0 the largest) and k.
        by_layer: int64 [L, 9], the same by layer and k.
    """

    by_rank: Tensor
    by_layer: Tensor


@dataclass
class Report:
    """Result of :func:`evaluate`; ``stored_bytes`` are those of all experts at k = 8, and
    ``allocations[i]`` belongs to ``rows[i]``."""

    tokens: int
    reference_perplexity: float
    stored_bytes: int
    rows: list[Row]
    allocations: list[Allocation]

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "reference_perplexity": self.reference_perplexity,
            "stored_bytes": self.stored_bytes,
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

    def forward_at(self, setting: "_Setting", layer: int, sums: "_Sums") -> ExpertsForward:
        """The layer's experts under one setting; what they read is added to ``sums``."""
        k_bar = torch.tensor([setting.k_bar], dtype=torch.float32)
        budget = budget_of(self.cost, k_bar, setting.mode, self.options.scope)

        def forward(hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            # In scope token a dispatch does not change the counts, so all tokens go at once.
            size = len(ids) if self.options.scope == "token" else setting.dispatch_tokens
            counts = torch.zeros_like(ids)
            for part in torch.arange(len(ids)).split(size):
                k = dispatch.allocate(gates[part], ids[part], budget)
                counts[part] = k[ids[part]] if k.dim() == 1 else k
            sums.bytes_read += self._bytes(ids, counts, setting.dispatch_tokens)
            sums.count(layer, gates, counts)
            return dispatch.fused_moe(
                hidden, self.experts, gates, ids, counts, self.options.activations
            )

        return forward

    def _bytes(self, ids: Tensor, counts: Tensor, dispatch_tokens: int) -> int:
        part = torch.arange(len(ids)) // dispatch_tokens
        deepest = torch.zeros(int(part[-1]) + 1, self.shape.num_experts, dtype=torch.int64)
        index = part[:, None] * self.shape.num_experts + ids
        deepest.view(-1).scatter_reduce_(0, index.flatten(), counts.flatten(), "amax")
        experts = torch.bincount(deepest.flatten(), minlength=NUM_TIERS).tolist()
        return sum(
            n * self.shape.expert_bytes(k, self.settings) for k, n in enumerate(experts) if k
        )


@dataclass(frozen=True)
class _Setting:
    """One row of the report."""

    mode: Mode
    dispatch_tokens: int
    k_bar: float


@dataclass
class _Sums:
    """Sums of one setting: per sequence, and where its chunks went."""

    num_layers: int
    kl: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    bytes_read: int = 0
    allocation: Allocation | None = None

    def count(self, layer: int, gates: Tensor, counts: Tensor) -> None:
        if self.allocation is None:
            by_rank = torch.zeros(counts.shape[1], NUM_TIERS, dtype=torch.int64)
            by_layer = torch.zeros(self.num_layers, NUM_TIERS, dtype=torch.int64)
            self.allocation = Allocation(by_rank, by_layer)
        ranked = counts.gather(1, gates.argsort(1, descending=True))
        for rank, k in enumerate(ranked.unbind(1)):
            self.allocation.by_rank[rank] += torch.bincount(k, minlength=NUM_TIERS)
        self.allocation.by_layer[layer] += torch.bincount(counts.flatten(), minlength=NUM_TIERS)


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
    settings = [
        _Setting(mode, size, k_bar)
        for mode in options.modes
        for size in options.dispatch_tokens
        for k_bar in options.k_bars
    ]
    sums = {setting: _Sums(len(layers)) for setting in settings}
    reference_nll: list[float] = []
    for batch in windows.split(BATCH_WINDOWS):
        exact = reference.logits(batch).log_softmax(-1)
        likeliest = exact.argmax(-1)
        reference_nll += _nll(exact, batch)
        for setting, total in sums.items():
            forwards = {
                layer.shape.prefix: layer.forward_at(setting, i, total)
                for i, layer in enumerate(layers)
            }
            with reference.replaced_experts(forwards, shapes):
                ours = reference.logits(batch).log_softmax(-1)
            total.kl += (exact.exp() * (exact - ours)).sum(-1).mean(1).tolist()
            total.nll += _nll(ours, batch)
            total.agreement += (ours.argmax(-1) == likeliest).float().mean(1).tolist()
            if advance is not None:
                advance(len(batch))
    stored = sum(
        layer.num_experts * layer.expert_bytes(NUM_CHUNKS, checkpoint.settings) for layer in shapes
    )
    rows = [_row(setting, total, options, windows.numel()) for setting, total in sums.items()]
    allocations = [total.allocation for total in sums.values() if total.allocation is not None]
    return Report(windows.numel(), _perplexity(reference_nll), stored, rows, allocations)


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


def _row(setting: _Setting, total: _Sums, options: EvaluateOptions, tokens: int) -> Row:
    kl = torch.tensor(total.kl, dtype=torch.float64)
    half_width = float(1.96 * kl.std() / math.sqrt(len(kl))) if len(kl) > 1 else None
    return Row(
        mode=setting.mode,
        scope=options.scope,
        dispatch_tokens=setting.dispatch_tokens,
        k_bar=setting.k_bar,
        kl=float(kl.mean()),
        kl_ci95=half_width,
        perplexity=_perplexity(total.nll),
        top1_agreement=sum(total.agreement) / len(total.agreement),
        bytes_read_per_token=total.bytes_read / tokens,
    )
