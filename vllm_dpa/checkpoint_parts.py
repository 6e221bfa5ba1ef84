# SPDX-License-Identifier: Apache-2.0
"""Chunk files from layers that are finished one by one, in any order, by any number of processes.

Every finished layer is eight part files, one per chunk. Joining goes chunk by chunk and drops the parts
of a chunk once its file is complete, so that the disk holds the checkpoint and one chunk more at most.
"""

import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_dpa.checkpoint import LayerShape, check_finite, chunk_files, chunk_specs, replace_file
from vllm_dpa.kernels.planes import NUM_CHUNKS, PlaneStack
from vllm_dpa.safetensors_stream import SafetensorsStream
from vllm_dpa.settings import CheckpointSettings


def _part(folder: Path, layer: LayerShape, chunk: int) -> Path:
    return folder / f"{layer.prefix}.chunk-{chunk}.safetensors"


def write_layer(folder: Path, layer: LayerShape, w13: PlaneStack, w2: PlaneStack) -> None:
    """Write the eight part files of a layer, each complete or not at all.

    Raises:
        DpaError: a scale, offset or gain is not finite, or a scale is negative.
    """
    for chunk, tensors in enumerate(_tensors(layer, w13, w2)):

        def write(path: Path, tensors: dict[str, Tensor] = tensors) -> None:
            save_file(tensors, path)

        replace_file(_part(folder, layer, chunk), write)


def _tensors(layer: LayerShape, w13: PlaneStack, w2: PlaneStack) -> list[dict[str, Tensor]]:
    """Name -> tensor of every chunk."""
    gain = torch.cat((w13.gain, w2.gain), dim=1)
    check_finite(gain, f"{layer.prefix}.gain")
    chunks: list[dict[str, Tensor]] = [{} for _ in range(NUM_CHUNKS)]
    chunks[0][f"{layer.prefix}.gain"] = gain
    for name, stack in (("w13", w13), ("w2", w2)):
        prefix = f"{layer.prefix}.{name}"
        check_finite(stack.offset, f"{prefix}.offset")
        chunks[0][f"{prefix}.offset"] = stack.offset
        for j, plane in enumerate(stack.planes):
            chunks[j][f"{prefix}.plane"] = plane
            if j < len(stack.scales):
                check_finite(stack.scales[j], f"{prefix}.scale", non_negative=True)
                chunks[j][f"{prefix}.scale"] = stack.scales[j]
    return chunks


def join_chunks(
    parts: Path, out: Path, layers: list[LayerShape], settings: CheckpointSettings
) -> list[str]:
    """Make the chunk files of a checkpoint in ``out`` from the parts of all its layers.

    A file that is there is complete and its parts may be gone: joining again after an interruption
    goes on where it stopped.

    Returns:
        The names of the chunk files, relative to ``out``.
    """
    names = []
    for chunk in range(NUM_CHUNKS):
        for name, members in chunk_files(layers, settings, chunk).items():
            names.append(name)
            path = out / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _join(parts, path, members, settings, chunk)
            for layer in members:
                _part(parts, layer, chunk).unlink(missing_ok=True)
    return names


def _join(
    parts: Path, path: Path, layers: list[LayerShape], settings: CheckpointSettings, chunk: int
) -> None:
    specs = {n: s for layer in layers for n, s in chunk_specs(layer, settings, chunk).items()}
    partial = path.with_name(f".{path.name}.partial")
    with SafetensorsStream(partial, specs) as stream:
        for layer in layers:
            with safe_open(_part(parts, layer, chunk), framework="pt") as part:
                for name in part.keys():  # noqa: SIM118 (not a mapping)
                    stream.put(name, part.get_tensor(name))
    os.replace(partial, path)
