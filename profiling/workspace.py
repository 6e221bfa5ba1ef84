# SPDX-License-Identifier: Apache-2.0
"""The folder beside OUT in which an encode grows, so that it can be killed, resumed and shared.

    .OUT.partial/record.json     what is being encoded, how, with which versions
    .OUT.partial/layers/         finished layers: eight chunk parts each, then the quality file
    .OUT.partial/lock-I-of-N     held by the process that encodes shard I

A layer counts as finished when its quality file, which is written last, is there.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_dpa.checkpoint import LayerShape, read_json, replace_file, write_json
from vllm_dpa.checkpoint_parts import write_layer
from vllm_dpa.errors import DpaError
from vllm_dpa.profiling.layer_fit import LayerFit

NOTES = "notes"


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count`` (from 1) of a model's layers: a contiguous run of them."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``I/N``.

        Raises:
            DpaError: not of that form, or not 1 <= I <= N.
        """
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise DpaError(f"--shard {text}: give I/N with 1 <= I <= N, e.g. 2/4")
        return cls(int(index), int(count))

    def of(self, layers: list[LayerShape]) -> list[LayerShape]:
        first, last = ((i * len(layers)) // self.count for i in (self.index - 1, self.index))
        return layers[first:last]


@dataclass(frozen=True)
class LayerErrors:
    """Errors of one finished layer.

    Attributes:
        tensors: ``error``, ``error_with_gain`` float64 [E, 9], ``power`` float64 [E] and, where it was
            calibrated, ``output_error`` float64 [E, 9]; see :class:`~.layer_fit.LayerFit`.
        notes: of the fitter.
    """

    tensors: dict[str, Tensor]
    notes: dict[str, Any]


class Workspace:
    """Finished layers of an encode into ``out``."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out.with_name(f".{out.name}.partial")
        self.layers = self.path / "layers"
        self._record = self.path / "record.json"

    @contextmanager
    def locked(self, record: dict[str, Any], shard: Shard) -> Iterator[None]:
        """Create or resume the workspace; within the context no other process encodes this shard.

        Raises:
            DpaError: another process does, or the workspace is that of another encode.
        """
        self.layers.mkdir(parents=True, exist_ok=True)
        lock = self.path / f"lock-{shard.index}-of-{shard.count}"
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DpaError(
                    f"{self.out} is being encoded by another process (shard {shard.index} of "
                    f"{shard.count}); wait for it, or choose another output folder"
                ) from None
            if self._record.exists():
                self._compare(record)
            else:
                write_json(self._record, record)
            try:
                yield
            except BaseException:
                if shard.count == 1 and not any(self.layers.glob("*.quality.safetensors")):
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

    def record(self) -> dict[str, Any]:
        """What is being encoded.

        Raises:
            DpaError: nothing is.
        """
        return read_json(self._record, "encode all shards first, then merge")

    def _compare(self, record: dict[str, Any]) -> None:
        found = self.record()
        wanted = json.loads(json.dumps(record))
        names = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
        if names:
            name = names[0]
            raise DpaError(
                f"{self.path} holds an unfinished encode with other {', '.join(names)} "
                f"({name}: {_short(found.get(name))} there, {_short(wanted.get(name))} now); go on with "
                "the same model, options and versions, or remove that folder to start again"
            )

    def _quality(self, layer: LayerShape) -> Path:
        return self.layers / f"{layer.prefix}.quality.safetensors"

    def is_done(self, layer: LayerShape) -> bool:
        return self._quality(layer).exists()

    def save(self, layer: LayerShape, fit: LayerFit) -> None:
        """Store a finished layer."""
        write_layer(self.layers, layer, fit.w13, fit.w2)
        tensors = {"error": fit.error, "error_with_gain": fit.error_with_gain, "power": fit.power}
        if fit.output_error is not None:
            tensors["output_error"] = fit.output_error
        metadata = {NOTES: json.dumps(fit.notes)}
        replace_file(self._quality(layer), lambda path: save_file(tensors, path, metadata))

    def errors(self, layer: LayerShape) -> LayerErrors:
        with safe_open(self._quality(layer), framework="pt") as file:
            notes = json.loads(file.metadata()[NOTES])
            return LayerErrors({n: file.get_tensor(n) for n in file.keys()}, notes)  # noqa: SIM118

    @property
    def finished(self) -> Path:
        """Where the checkpoint grows that becomes ``out``."""
        return self.path / "out"

    def finish(self) -> None:
        """Rename the complete checkpoint to ``out`` and drop the workspace."""
        os.rename(self.finished, self.out)
        shutil.rmtree(self.path)

    def drop_finished(self) -> None:
        """Drop what is left of a workspace that was killed after ``out`` was complete."""
        if self.path.exists() and not self.finished.exists() and self.out.exists():
            shutil.rmtree(self.path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def require_space(folder: Path, needed: int) -> None:
    """Raises DpaError unless the file system of ``folder`` has ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DpaError(
            f"{folder} has {free / 2**30:.1f} GiB free, encoding needs {needed / 2**30:.1f} GiB; free "
            "some space or choose another output folder"
        )


def versions(device: torch.device) -> dict[str, str]:
    """What may change the last bits of a fit, for the record."""
    return {"torch": torch.__version__, "device": device.type}
