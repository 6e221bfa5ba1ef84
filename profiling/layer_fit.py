# SPDX-License-Identifier: Apache-2.0
"""What the encoder asks of a fit: the weights of a layer in, its planes and their errors out.

A :class:`LayerFitter` knows the method (and the calibration data, where it needs some); the encoder
knows files. Fits of different experts are independent, so a layer is fitted in blocks of experts.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Protocol, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from vllm_dpa.checkpoint import LayerShape
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_CHUNKS, PlaneStack
from vllm_dpa.profiling.fit.matrix import MatrixFit, cut_groups
from vllm_dpa.profiling.fit.stage_a import tier_weights
from vllm_dpa.profiling.source import SourceCheckpoint
from vllm_dpa.settings import GroupSize, ScaleLayout

# Groups of the layer that set its tier weights: their errors are averages, and steady long before.
SAMPLE_GROUPS = 4096
# Weight of a tier that is not a target, beside its weight as one: it stays a sound decode.
OTHER_TIERS = 0.05

Advance = Callable[[int], None]


def _ascending(tiers: tuple[int, ...]) -> tuple[int, ...]:
    if not tiers or sorted(set(tiers)) != list(tiers):
        raise ValueError("target tiers must be ascending and different, e.g. 3,4,5")
    return tiers


TargetTiers = Annotated[
    tuple[Annotated[int, Field(ge=MIN_CHUNKS, le=NUM_CHUNKS)], ...], AfterValidator(_ascending)
]


class EncodeOptions(BaseModel):
    """Dials of the encoder.

    Attributes:
        scale_layout: ``per_chunk`` (one scale per plane) or ``geometric`` (one, halved per plane).
        group_size: input columns that share a scale and an offset.
        tier_exponent: x in w_k = E_k^-x: larger favours high tiers, smaller favours low ones.
        target_tiers: the tiers that will be used; the others weigh a twentieth. All by default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scale_layout: ScaleLayout = "geometric"
    group_size: GroupSize = 128
    tier_exponent: Annotated[float, Field(ge=0, le=2)] = 0.5
    target_tiers: TargetTiers = tuple(range(MIN_CHUNKS, NUM_CHUNKS + 1))


@dataclass(frozen=True)
class LayerWeights:
    """The routed experts of one layer, read when asked for.

    Attributes:
        shape: their number and sizes.
        expert: index -> float32 w13 [2I, H] (gate rows, then up rows) and w2 [H, I].
        where: for messages.
    """

    shape: LayerShape
    expert: Callable[[int], tuple[Tensor, Tensor]]
    where: str

    @classmethod
    def of_source(cls, source: SourceCheckpoint, shape: LayerShape) -> Self:
        where = f"{source.path}: {shape.prefix}"
        return cls(shape, partial(source.expert, shape.prefix), where)

    def tier_weights(self, options: EncodeOptions) -> Tensor:
        """w_k, float32 [9], from an even sample of the first expert's groups."""
        cuts = [cut_groups(w, options.group_size) for w in self.expert(0)]
        groups, mask = (torch.cat([cut[i] for cut in cuts]) for i in (0, 1))
        stride = max(1, len(groups) // SAMPLE_GROUPS)
        with one_thread_each(groups.device) as run:
            (weights,) = run(
                tier_weights, [groups[::stride]], [mask[::stride]], [options.tier_exponent]
            )
        for k in set(range(MIN_CHUNKS, NUM_CHUNKS + 1)) - set(options.target_tiers):
            weights[k] *= OTHER_TIERS
        return weights / weights.sum()


@dataclass
class ExpertFit:
    """A block of fitted experts.

    Attributes:
        w13, w2: their matrices.
        output_error: float64 [E, 9], squared error of the expert's output over its square, at tier
            k on calibration tokens; None without calibration.
    """

    w13: MatrixFit
    w2: MatrixFit
    output_error: Tensor | None = None


@dataclass
class LayerFit:
    """A fitted layer.

    Attributes:
        w13, w2: all planes of all experts.
        error, error_with_gain: float64 [E, 9], squared error of the weights at tier k.
        power: float64 [E], sum of squares of the weights.
        output_error: as in :class:`ExpertFit`.
        notes: for the manifest, e.g. tokens seen per expert.
    """

    w13: PlaneStack
    w2: PlaneStack
    error: Tensor
    error_with_gain: Tensor
    power: Tensor
    output_error: Tensor | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class LayerFitter(Protocol):
    """A method of fitting.

    Attributes:
        name: recorded in the manifest.
        device: where it computes.
    """

    name: str
    device: torch.device

    def fit(self, weights: LayerWeights, options: EncodeOptions, advance: Advance) -> LayerFit:
        """Fit a layer; ``advance`` is called with the number of weights done.

        The result depends on the weights, the options and :meth:`identity` alone, not on the number
        of threads.
        """

    def identity(self) -> dict[str, Any]:
        """What besides the options determines the result; for the manifest and for resuming."""

    def working_bytes(self, shape: LayerShape, options: EncodeOptions) -> int:
        """Memory that fitting a layer takes at its peak, without its weights and planes."""


def fit_blocks(
    weights: LayerWeights,
    options: EncodeOptions,
    fit_block: Callable[[range], ExpertFit],
    block: int,
    device: torch.device,
    advance: Advance,
) -> LayerFit:
    """Fit a layer in blocks of ``block`` experts; on the CPU several blocks at once, one thread each,
    so that no sum depends on the number of threads.

    Raises:
        DpaError: a scale or offset does not fit in fp16.
    """
    shape = weights.shape
    experts = shape.num_experts
    blocks = [range(i, min(i + block, experts)) for i in range(0, experts, block)]
    parts: list[ExpertFit] = []
    with one_thread_each(device) as run:
        for members, part in zip(blocks, run(fit_block, blocks), strict=True):
            for matrix in (part.w13, part.w2):
                _check_range(matrix, weights.where, members.start)
            parts.append(part)
            advance(len(members) * (shape.num_weights // experts))
    w13, w2 = [p.w13 for p in parts], [p.w2 for p in parts]
    outputs = [p.output_error for p in parts if p.output_error is not None]
    return LayerFit(
        w13=_stack(w13, shape.hidden_size, options),
        w2=_stack(w2, shape.intermediate_size, options),
        error=_sum_of(w13, w2, "error"),
        error_with_gain=_sum_of(w13, w2, "error_with_gain"),
        power=_sum_of(w13, w2, "power"),
        output_error=torch.cat(outputs) if outputs else None,
    )


@contextmanager
def one_thread_each(device: torch.device) -> Iterator[Callable[..., Iterator[Any]]]:
    """A ``map`` that runs as many calls at once as torch has threads, each on a single one.

    A matrix product may be summed in another order on another number of threads; on one it is
    always the same. On other devices than the CPU it is the plain ``map``.
    """
    if device.type != "cpu":
        yield map
        return
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _sum_of(w13: list[MatrixFit], w2: list[MatrixFit], name: str) -> Tensor:
    return sum(torch.cat([getattr(m, name) for m in fits]) for fits in (w13, w2))  # type: ignore


def _check_range(matrix: MatrixFit, where: str, first: int) -> None:
    for tensor in (*matrix.scales, matrix.offset):
        bad = ~torch.isfinite(tensor).flatten(1).all(1)
        if bool(bad.any()):
            expert = first + int(bad.nonzero()[0])
            raise DpaError(
                f"{where}, expert {expert}: weights beyond the range of fp16 scales (65504); "
                "rescale them"
            )


def _stack(fits: list[MatrixFit], columns: int, options: EncodeOptions) -> PlaneStack:
    gain = torch.cat([f.gain for f in fits])
    gain[..., :MIN_CHUNKS] = 1.0
    return PlaneStack(
        planes=[torch.cat(p) for p in zip(*(f.planes for f in fits), strict=True)],
        scales=[torch.cat(s) for s in zip(*(f.scales for f in fits), strict=True)],
        offset=torch.cat([f.offset for f in fits]),
        gain=gain,
        columns=columns,
        group_size=options.group_size,
        scale_layout=options.scale_layout,
    )
