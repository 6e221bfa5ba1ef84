# SPDX-License-Identifier: Apache-2.0
"""What an encoded checkpoint holds: bytes, bits per weight and fit quality per tier."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.planes import (
    MIN_CHUNKS,
    NUM_CHUNKS,
    NUM_TIERS,
    PER_CHUNK,
    PlaneStack,
    num_groups,
)
from vllm_dpa.kernels.tier_decoder import TierDecoder
from vllm_dpa.profiling.fit.matrix import ErrorSums
from vllm_dpa.profiling.source import SourceCheckpoint


def inspect(
    checkpoint: CheckpointReader,
    source: SourceCheckpoint | None = None,
    advance: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Describe a checkpoint as JSON-able values.

    Args:
        checkpoint: with all chunks.
        source: the unencoded model. With it, ``sqnr_db_with_gain`` is measured from the files (as
            decoded in serving) instead of taken from the manifest, and ``sqnr_db`` likewise without
            the gains.
        advance: called with the number of experts done, for progress.

    Returns:
        ``scale_overhead`` is the share of the scales in codes + scales at k = 8, offsets not
        counted. ``tiers[].bytes`` and ``bits_per_weight`` count planes, scales and offsets of all
        routed experts; the gains (27 floats per expert) are ``gain_bytes``.

    Raises:
        DpaError: ``source`` is not the model that was encoded.
    """
    manifest, settings = checkpoint.manifest, checkpoint.settings
    weights = sum(layer.num_weights for layer in manifest.layers)
    quality = _manifest_quality(checkpoint) if source is None else _measure(
        checkpoint, source, advance
    )  # fmt: skip
    tiers = []
    for k in range(MIN_CHUNKS, NUM_TIERS):
        size = sum(layer.num_experts * layer.expert_bytes(k, settings) for layer in manifest.layers)
        tiers.append({"k": k, "bytes": size, "bits_per_weight": size * 8 / weights, **quality[k]})
    return {
        "format_version": manifest.format_version,
        "scale_layout": settings.scale_layout,
        "group_size": settings.group_size,
        "num_chunks": settings.num_chunks,
        "scale_overhead": _scale_overhead(checkpoint),
        "gain_bytes": sum(layer.num_experts * 3 * NUM_TIERS * 4 for layer in manifest.layers),
        "weights": weights,
        "tiers": tiers,
        "layers": [
            {**layer.model_dump(), "sqnr_db": measured.sqnr_db[MIN_CHUNKS - 1 :]}
            for layer, measured in zip(manifest.layers, manifest.quality.layers, strict=True)
        ],
        "encoder": manifest.encoder,
        "source": manifest.source,
        "residuals": manifest.profile,
    }


def _scale_overhead(checkpoint: CheckpointReader) -> float:
    settings = checkpoint.settings
    count = NUM_CHUNKS if settings.scale_layout == PER_CHUNK else 1
    scale_bits = code_bits = 0
    for layer in checkpoint.manifest.layers:
        for rows, columns, _ in layer.matrices().values():
            scale_bits += rows * count * num_groups(columns, settings.group_size) * 16
            code_bits += rows * columns * NUM_CHUNKS
    return scale_bits / (scale_bits + code_bits)


def _manifest_quality(checkpoint: CheckpointReader) -> dict[int, dict[str, float]]:
    return {
        tier.k: {"sqnr_db": tier.sqnr_db, "sqnr_db_with_gain": tier.sqnr_db_with_gain}
        for tier in checkpoint.manifest.quality.tiers
    }


def _measure(
    checkpoint: CheckpointReader,
    source: SourceCheckpoint,
    advance: Callable[[int], None] | None,
) -> dict[int, dict[str, float]]:
    """SQNR per tier from the decoded files and the source weights."""
    if source.layers != checkpoint.manifest.layers:
        raise DpaError(
            f"{source.path} has other MoE layers than {checkpoint.path}; is it the model that was "
            "encoded?"
        )
    sums = ErrorSums()
    for layer in checkpoint.manifest.layers:
        stacks = checkpoint.read_layer(layer.prefix)
        for expert in range(layer.num_experts):
            for weight, stack in zip(source.expert(layer.prefix, expert), stacks, strict=True):
                sums.add(*_matrix_errors(weight, stack, expert))
            if advance is not None:
                advance(1)
    plain, gained = sums.sqnr_db(sums.error), sums.sqnr_db(sums.with_gain)
    return {
        k: {"sqnr_db": plain[k - 1], "sqnr_db_with_gain": gained[k - 1]}
        for k in range(MIN_CHUNKS, NUM_TIERS)
    }


def _matrix_errors(target: Tensor, stack: PlaneStack, expert: int) -> tuple[Tensor, Tensor, float]:
    """Squared errors of one decoded matrix without and with gain, float64 [9] each, and its power."""
    error, with_gain = torch.zeros(2, NUM_TIERS, dtype=torch.float64)
    decoder = TierDecoder(stack, expert)
    for k in range(MIN_CHUNKS, NUM_TIERS):
        decoded = decoder.advance(k)
        gain = stack.gain[expert, :, k].repeat_interleave(stack.rows // stack.gain.shape[1])
        error[k] = (target - decoded / gain[:, None]).double().square().sum()
        with_gain[k] = (target - decoded).double().square().sum()
    return error, with_gain, float(target.double().square().sum())
