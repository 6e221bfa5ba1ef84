# SPDX-License-Identifier: Apache-2.0
"""Encode: Hugging Face checkpoint -> DPA checkpoint, one layer in memory at a time."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_dpa import __version__
from vllm_dpa.checkpoint import (
    CONFIG,
    MANIFEST,
    QUALITY,
    LayerQuality,
    LayerShape,
    Manifest,
    Quality,
    TierQuality,
    record_file,
    write_json,
)
from vllm_dpa.checkpoint_parts import join_chunks
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_CHUNKS, NUM_TIERS
from vllm_dpa.profiling.fit.matrix import ErrorSums
from vllm_dpa.profiling.fitters import StageA
from vllm_dpa.profiling.layer_fit import Advance, EncodeOptions, LayerFitter, LayerWeights
from vllm_dpa.profiling.source import INDEX, SourceCheckpoint
from vllm_dpa.profiling.workspace import (
    LayerErrors,
    Shard,
    Workspace,
    require_space,
    versions,
)
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

    ``out`` appears complete or not at all. An interrupted encode goes on where it stopped when it is
    called again with the same arguments, and ends with the same bytes.

    Args:
        model: folder of a Hugging Face checkpoint.
        out: folder to create.
        options: dials.
        fitter: the method; stage A, which needs no calibration, by default.
        advance: called with the number of weights done, for progress.

    Raises:
        DpaError: bad source, ``out`` exists, another process encodes into it, an unfinished encode
            with other arguments is there, or the disk is too small.
    """
    encode_shard(model, out, options, fitter, advance)
    return merge(model, out)


def encode_shard(
    model: Path,
    out: Path,
    options: EncodeOptions,
    fitter: LayerFitter | None = None,
    advance: Advance | None = None,
    shard: Shard | None = None,
) -> None:
    """Encode some of the layers, for :func:`merge` to join; arguments and errors of :func:`encode`.

    Args:
        shard: which part of the layers, all by default. All shards share the folder ``out`` lies in.
    """
    fitter, shard, advance = fitter or StageA(), shard or Shard(), advance or _nothing
    source = SourceCheckpoint(model)
    workspace = workspace_of(out)
    workspace.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "vllm_dpa": __version__,
        **versions(fitter.device),
        "model": source.fingerprint(),
        "options": options.model_dump(),
        "encoder": {"name": fitter.name, **fitter.identity()},
    }
    with workspace.locked(record, shard):
        layers = shard.of(source.layers)
        missing = [layer for layer in layers if not workspace.is_done(layer)]
        require_space(workspace.out.parent, disk_bytes(source, _settings(options), missing))
        advance(sum(layer.num_weights for layer in layers if layer not in missing))
        for layer in missing:
            workspace.save(
                layer, fitter.fit(LayerWeights.of_source(source, layer), options, advance)
            )


def merge(model: Path, out: Path) -> Manifest:
    """Make the checkpoint ``out`` from its finished layers.

    Args:
        model: the model that was encoded.
        out: folder to create.

    Raises:
        DpaError: layers are missing, ``model`` is another one, or the disk is too small.
    """
    source = SourceCheckpoint(model)
    workspace = workspace_of(out)
    record = workspace.record()
    if record["model"] != source.fingerprint():
        raise DpaError(f"{workspace.path} was made from another model than {model}")
    missing = [layer.prefix for layer in source.layers if not workspace.is_done(layer)]
    if missing:
        raise DpaError(
            f"{len(missing)} of {len(source.layers)} layers are not encoded yet, the first is "
            f"{missing[0]}; run the encode of their shard again"
        )
    options = EncodeOptions(**record["options"])
    with workspace.locked(record, Shard()):
        return _join(source, workspace, _settings(options), record)


def _join(
    source: SourceCheckpoint,
    workspace: Workspace,
    settings: CheckpointSettings,
    record: dict[str, Any],
) -> Manifest:
    finished = workspace.finished
    finished.mkdir(exist_ok=True)
    require_space(finished, disk_bytes(source, settings, []))
    files = _copy_rest(source, finished)
    files += join_chunks(workspace.layers, finished, source.layers, settings)
    errors = [workspace.errors(layer) for layer in source.layers]
    _write_quality(finished, errors)
    write_json(finished / CONFIG, source.config | {"quantization_config": settings.model_dump()})
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        settings=settings,
        layers=source.layers,
        files={name: record_file(finished / name) for name in [*files, QUALITY]},
        encoder={
            **record["encoder"],
            "version": record["vllm_dpa"],
            **record["options"],
            "layers": {
                layer.prefix: e.notes
                for layer, e in zip(source.layers, errors, strict=True)
                if e.notes
            },
        },
        source=source.provenance(),
        quality=_quality(source.layers, errors),
    )
    write_json(finished / MANIFEST, manifest.model_dump())
    workspace.finish()
    return manifest


def disk_bytes(
    source: SourceCheckpoint, settings: CheckpointSettings, layers: list[LayerShape]
) -> int:
    """Disk that is still needed: these layers, one chunk of all layers once more while it is joined, and
    everything that is not a routed expert's."""
    chunks = sum(layer.num_experts * layer.expert_bytes(NUM_CHUNKS, settings) for layer in layers)
    largest = sum(layer.num_experts * layer.expert_bytes(1, settings) for layer in source.layers)
    return chunks + largest + source.rest_bytes()


def _settings(options: EncodeOptions) -> CheckpointSettings:
    return CheckpointSettings(group_size=options.group_size, scale_layout=options.scale_layout)


def workspace_of(out: Path) -> Workspace:
    """Where the encode into ``out`` grows; raises DpaError if ``out`` exists."""
    out = Path(out)
    if out.exists():
        Workspace(out).drop_finished()
        raise DpaError(f"{out} exists; remove it or choose another output folder")
    return Workspace(out)


def _copy_rest(source: SourceCheckpoint, out: Path) -> list[str]:
    """Copy everything that is not a routed expert; returns the weight files written."""
    for path in sorted(source.path.iterdir()):
        skip = path.name in (CONFIG, INDEX) or path.name.startswith(".")
        if path.is_file() and not skip and path.suffix not in WEIGHT_SUFFIXES:
            shutil.copyfile(path, out / path.name)
    written = []
    for file, names in source.rest().items():
        with SafetensorsStream(out / file, {n: source.spec(n) for n in names}) as stream:
            for name in names:
                stream.put(name, source.tensor(name).to(source.spec(name)[0]))
        written.append(file)
    if source.index() is not None:
        kept = {name: file for file, names in source.rest().items() for name in names}
        write_json(out / INDEX, {"metadata": {}, "weight_map": kept})
    return written


def _write_quality(out: Path, errors: list[LayerErrors]) -> None:
    """Per-expert errors of all layers, [L, E, 9] and [L, E]; layers with fewer experts end in zeros."""
    names = set.intersection(*(set(e.tensors) for e in errors))
    experts = max(len(e.tensors["power"]) for e in errors)
    tensors = {}
    for name in sorted(names):
        parts = [e.tensors[name] for e in errors]
        table = parts[0].new_zeros(len(parts), experts, *parts[0].shape[1:])
        for row, part in zip(table, parts, strict=True):
            row[: len(part)] = part
        tensors[name] = table
    save_file(tensors, out / QUALITY)


def _quality(layers: list[LayerShape], errors: list[LayerErrors]) -> Quality:
    total = ErrorSums()
    rows = []
    for layer, found in zip(layers, errors, strict=True):
        sums = ErrorSums()
        for one in (sums, total):
            one.add(*_sums(found))
        rows.append(LayerQuality(prefix=layer.prefix, sqnr_db=sums.sqnr_db(sums.error)))
    plain, gained = total.sqnr_db(total.error), total.sqnr_db(total.with_gain)
    tiers = [
        TierQuality(k=k, sqnr_db=plain[k - 1], sqnr_db_with_gain=gained[k - 1])
        for k in range(MIN_CHUNKS, NUM_TIERS)
    ]
    return Quality(tiers=tiers, layers=rows)


def _sums(errors: LayerErrors) -> tuple[torch.Tensor, torch.Tensor, float]:
    tensors = errors.tensors
    return (
        tensors["error"].sum(0),
        tensors["error_with_gain"].sum(0),
        float(tensors["power"].sum()),
    )


def _nothing(_: int) -> None:
    pass
