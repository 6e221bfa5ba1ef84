# SPDX-License-Identifier: Apache-2.0
"""Encode: Hugging Face checkpoint -> DPA checkpoint, one layer in memory at a time."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from vllm_dpa import __version__
from vllm_dpa.checkpoint import (
    CONFIG,
    MANIFEST,
    ChunkWriter,
    LayerQuality,
    LayerShape,
    Manifest,
    Quality,
    TierQuality,
    record_file,
    write_json,
)
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_TIERS, PlaneStack
from vllm_dpa.profiling.fit.matrix import ErrorSums, MatrixFit, assemble, cut_groups
from vllm_dpa.profiling.fit.stage_a import fit_groups, tier_weights
from vllm_dpa.profiling.source import INDEX, SourceCheckpoint
from vllm_dpa.safetensors_stream import SafetensorsStream
from vllm_dpa.settings import FORMAT_VERSION, CheckpointSettings, GroupSize, ScaleLayout

# Groups of the layer that set its tier weights: their errors are averages, and steady long before.
SAMPLE_GROUPS = 4096
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")


class EncodeOptions(BaseModel):
    """Dials of the encoder.

    Attributes:
        scale_layout: ``per_chunk`` (one scale per plane) or ``geometric`` (one, halved per plane).
        group_size: input columns that share a scale and an offset.
        tier_exponent: x in w_k = E_k^-x: larger favours high tiers, smaller favours low ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scale_layout: ScaleLayout = "per_chunk"
    group_size: GroupSize = 128
    tier_exponent: Annotated[float, Field(ge=0, le=2)] = 0.5


def encode(
    model: Path,
    out: Path,
    options: EncodeOptions,
    advance: Callable[[int], None] | None = None,
) -> Manifest:
    """Encode every routed expert of ``model`` into the new folder ``out``.

    The folder appears complete or not at all: everything is written beside it and renamed.

    Args:
        model: folder of a Hugging Face checkpoint.
        out: folder to create.
        options: dials.
        advance: called with the number of weights done, for progress.

    Raises:
        DpaError: bad source, or ``out`` exists.
    """
    source = SourceCheckpoint(model)
    settings = CheckpointSettings(group_size=options.group_size, scale_layout=options.scale_layout)
    out = Path(out)
    if out.exists():
        raise DpaError(f"{out} exists; remove it or choose another output folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        files = _copy_rest(source, partial)
        chunks, quality = _encode_layers(source, partial, settings, options, advance)
        config = source.config | {"quantization_config": settings.model_dump()}
        write_json(partial / CONFIG, config)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            settings=settings,
            layers=source.layers,
            files={name: record_file(partial / name) for name in files + chunks},
            encoder={"name": "stage_a", "version": __version__, **options.model_dump()},
            source=source.provenance(),
            quality=quality,
        )
        write_json(partial / MANIFEST, manifest.model_dump())
        os.rename(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def _copy_rest(source: SourceCheckpoint, out: Path) -> list[str]:
    """Copy everything that is not a routed expert; returns the weight files written."""
    for path in sorted(source.path.iterdir()):
        skip = path.name in (CONFIG, INDEX) or path.name.startswith(".")
        if path.is_file() and not skip and path.suffix not in WEIGHT_SUFFIXES:
            shutil.copyfile(path, out / path.name)
    written = []
    for file in source.files:
        names = [n for n, f in source.file_of.items() if f == file and not source.is_expert(n)]
        if not names:
            continue
        with SafetensorsStream(out / file, {n: source.spec(n) for n in names}) as stream:
            for name in names:
                stream.put(name, source.tensor(name))
        written.append(file)
    index = source.index()
    if index is not None:
        kept = {n: f for n, f in index["weight_map"].items() if not source.is_expert(n)}
        write_json(out / INDEX, {"metadata": {}, "weight_map": kept})
    return written


def _encode_layers(
    source: SourceCheckpoint,
    out: Path,
    settings: CheckpointSettings,
    options: EncodeOptions,
    advance: Callable[[int], None] | None,
) -> tuple[list[str], Quality]:
    total = ErrorSums()
    layers = []
    with ChunkWriter(out, source.layers, settings) as writer:
        for layer in source.layers:
            sums = ErrorSums()
            w13, w2 = _encode_layer(source, layer, settings, options, sums, advance)
            writer.put(layer, w13, w2)
            layers.append(LayerQuality(prefix=layer.prefix, sqnr_db=sums.sqnr_db(sums.error)))
            total.add(sums.error, sums.with_gain, sums.power)
    plain, gained = total.sqnr_db(total.error), total.sqnr_db(total.with_gain)
    tiers = [
        TierQuality(k=k, sqnr_db=plain[k - 1], sqnr_db_with_gain=gained[k - 1])
        for k in range(MIN_CHUNKS, NUM_TIERS)
    ]
    return writer.files, Quality(tiers=tiers, layers=layers)


def _encode_layer(
    source: SourceCheckpoint,
    layer: LayerShape,
    settings: CheckpointSettings,
    options: EncodeOptions,
    sums: ErrorSums,
    advance: Callable[[int], None] | None,
) -> tuple[PlaneStack, PlaneStack]:
    """Fit a layer expert by expert; returns the planes of all of them."""
    weights_of_tiers = _layer_tier_weights(source, layer, options)
    fits: tuple[list[MatrixFit], list[MatrixFit]] = ([], [])
    for expert in range(layer.num_experts):
        for i, weight in enumerate(source.expert(layer.prefix, expert)):
            groups, mask = cut_groups(weight, options.group_size)
            fit = fit_groups(groups, mask, weights_of_tiers, options.scale_layout)
            _check_range(fit.scale, fit.offset, f"{source.path}: {layer.prefix}, expert {expert}")
            matrix = assemble(weight[None], fit, options.group_size, row_blocks=2 - i)
            sums.add(matrix.error.sum(0), matrix.error_with_gain.sum(0), float(matrix.power.sum()))
            fits[i].append(matrix)
        if advance is not None:
            advance(layer.num_weights // layer.num_experts)
    columns = (layer.hidden_size, layer.intermediate_size)
    w13, w2 = (_stack(f, c, settings) for f, c in zip(fits, columns, strict=True))
    return w13, w2


def _layer_tier_weights(
    source: SourceCheckpoint, layer: LayerShape, options: EncodeOptions
) -> Tensor:
    """Tier weights of a layer, from an even sample of its first expert's groups."""
    cuts = [cut_groups(w, options.group_size) for w in source.expert(layer.prefix, 0)]
    groups, mask = (torch.cat([cut[i] for cut in cuts]) for i in (0, 1))
    stride = max(1, len(groups) // SAMPLE_GROUPS)
    return tier_weights(groups[::stride], mask[::stride], options.tier_exponent)


def _check_range(scale: Tensor, offset: Tensor, where: str) -> None:
    if not bool(torch.isfinite(scale).all() and torch.isfinite(offset).all()):
        raise DpaError(f"{where}: weights beyond the range of fp16 scales (65504); rescale them")


def _stack(fits: list[MatrixFit], columns: int, settings: CheckpointSettings) -> PlaneStack:
    gain = torch.cat([f.gain for f in fits])
    gain[..., :MIN_CHUNKS] = 1.0
    return PlaneStack(
        planes=[torch.cat(p) for p in zip(*(f.planes for f in fits), strict=True)],
        scales=[torch.cat(s) for s in zip(*(f.scales for f in fits), strict=True)],
        offset=torch.cat([f.offset for f in fits]),
        gain=gain,
        columns=columns,
        group_size=settings.group_size,
        scale_layout=settings.scale_layout,
    )
