# SPDX-License-Identifier: Apache-2.0
"""Encode: Hugging Face checkpoint -> DPA checkpoint, one layer in memory at a time."""

import os
import shutil
from pathlib import Path
from typing import Any

from vllm_dpa import __version__
from vllm_dpa.checkpoint import (
    CONFIG,
    MANIFEST,
    ChunkWriter,
    LayerQuality,
    Manifest,
    Quality,
    TierQuality,
    record_file,
    write_json,
)
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_TIERS
from vllm_dpa.profiling.fit.matrix import ErrorSums
from vllm_dpa.profiling.fitters import StageA
from vllm_dpa.profiling.layer_fit import Advance, EncodeOptions, LayerFitter, LayerWeights
from vllm_dpa.profiling.source import INDEX, SourceCheckpoint
from vllm_dpa.safetensors_stream import SafetensorsStream
from vllm_dpa.settings import FORMAT_VERSION, CheckpointSettings

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")


def encode(
    model: Path,
    out: Path,
    options: EncodeOptions,
    fitter: LayerFitter | None = None,
    advance: Advance | None = None,
) -> Manifest:
    """Encode every routed expert of ``model`` into the new folder ``out``.

    The folder appears complete or not at all: everything is written beside it and renamed.

    Args:
        model: folder of a Hugging Face checkpoint.
        out: folder to create.
        options: dials.
        fitter: the method; stage A, which needs no calibration, by default.
        advance: called with the number of weights done, for progress.

    Raises:
        DpaError: bad source, or ``out`` exists.
    """
    fitter = fitter or StageA()
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
        chunks, quality, notes = _encode_layers(
            source, partial, settings, options, fitter, advance or _nothing
        )
        config = source.config | {"quantization_config": settings.model_dump()}
        write_json(partial / CONFIG, config)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            settings=settings,
            layers=source.layers,
            files={name: record_file(partial / name) for name in files + chunks},
            encoder={
                "name": fitter.name,
                "version": __version__,
                **options.model_dump(),
                **fitter.identity(),
                "layers": notes,
            },
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
    fitter: LayerFitter,
    advance: Advance,
) -> tuple[list[str], Quality, dict[str, Any]]:
    total = ErrorSums()
    layers = []
    notes = {}
    with ChunkWriter(out, source.layers, settings) as writer:
        for layer in source.layers:
            fit = fitter.fit(LayerWeights(layer, source), options, advance)
            writer.put(layer, fit.w13, fit.w2)
            sums = ErrorSums()
            for one in (sums, total):
                one.add(fit.error.sum(0), fit.error_with_gain.sum(0), float(fit.power.sum()))
            layers.append(LayerQuality(prefix=layer.prefix, sqnr_db=sums.sqnr_db(sums.error)))
            if fit.notes:
                notes[layer.prefix] = fit.notes
    plain, gained = total.sqnr_db(total.error), total.sqnr_db(total.with_gain)
    tiers = [
        TierQuality(k=k, sqnr_db=plain[k - 1], sqnr_db_with_gain=gained[k - 1])
        for k in range(MIN_CHUNKS, NUM_TIERS)
    ]
    return writer.files, Quality(tiers=tiers, layers=layers), notes


def _nothing(_: int) -> None:
    pass
