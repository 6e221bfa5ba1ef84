# SPDX-License-Identifier: Apache-2.0
"""The on-disk format: reader, writer and validation. No vLLM here.

    config.json                    the model's own, plus quantization_config
    model*.safetensors             every tensor that is not a routed expert's
    dpa/manifest.json              layers, file sizes and hashes, encoder settings
    dpa/chunk-J.safetensors        chunk J of every layer (sharded over 5 GB)
    dpa/residuals.safetensors      R[layer, expert, k], from ``vllm-dpa profile``
    dpa/quality.safetensors        errors of every expert at every tier, for reports

Per layer, chunk J holds ``{prefix}.{w13|w2}.plane`` and ``.scale``; chunk 0 also ``.offset`` and
``{prefix}.gain``. In the geometric layout only chunk 0 has a scale.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_dpa.errors import DpaError, one_line
from vllm_dpa.kernels.planes import (
    MIN_CHUNKS,
    NUM_CHUNKS,
    NUM_TIERS,
    PER_CHUNK,
    PlaneStack,
    expert_bytes,
    num_groups,
    plane_bytes,
)
from vllm_dpa.safetensors_stream import DTYPE_NAMES, Spec
from vllm_dpa.settings import FORMAT_VERSION, CheckpointSettings

DPA_FOLDER = "dpa"
MANIFEST = "dpa/manifest.json"
RESIDUALS = "dpa/residuals.safetensors"
QUALITY = "dpa/quality.safetensors"
CONFIG = "config.json"
SHARD_BYTES = 5 * 10**9

# One file name, or one below dpa/: a manifest can never point outside its own folder.
FileName = Annotated[str, Field(pattern=r"^(dpa/)?[A-Za-z0-9_][A-Za-z0-9._-]*$")]
Size = Annotated[int, Field(ge=1, le=2**31)]


class FileRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LayerShape(BaseModel):
    """One encoded MoE layer. ``prefix`` is its module name, e.g. ``model.layers.0.mlp.experts``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")]
    num_experts: Size
    hidden_size: Size
    intermediate_size: Size

    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Name -> (rows, columns, row blocks with gains of their own)."""
        return {
            "w13": (2 * self.intermediate_size, self.hidden_size, 2),
            "w2": (self.hidden_size, self.intermediate_size, 1),
        }

    @property
    def num_weights(self) -> int:
        return 3 * self.num_experts * self.hidden_size * self.intermediate_size

    def expert_bytes(self, k: int, settings: CheckpointSettings) -> int:
        """Bytes of one expert at tier k: planes, scales and offsets of all three matrices."""
        return sum(
            expert_bytes(rows, columns, k, settings.group_size, settings.scale_layout)
            for rows, columns, _ in self.matrices().values()
        )


class TierQuality(BaseModel):
    """Signal over error power of tier k, all experts together; in dB, gain not applied unless said."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    k: int
    sqnr_db: float
    sqnr_db_with_gain: float


class LayerQuality(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix: str
    sqnr_db: list[float]


class Quality(BaseModel):
    """Measured by the encoder against the source weights. ``layers[].sqnr_db`` starts at k = 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tiers: list[TierQuality]
    layers: list[LayerQuality]


class Manifest(BaseModel):
    """``dpa/manifest.json``."""

    model_config = ConfigDict(extra="forbid")

    format_version: int
    settings: CheckpointSettings
    layers: Annotated[list[LayerShape], Field(min_length=1)]
    files: dict[FileName, FileRecord]
    encoder: dict[str, Any]
    source: dict[str, Any]
    quality: Quality
    profile: dict[str, Any] | None = None


def chunk_specs(layer: LayerShape, settings: CheckpointSettings, chunk: int) -> dict[str, Spec]:
    """Tensor name -> (dtype, shape) of one layer in chunk file ``chunk``."""
    specs: dict[str, Spec] = {}
    experts = layer.num_experts
    for name, (rows, columns, _) in layer.matrices().items():
        groups = num_groups(columns, settings.group_size)
        prefix = f"{layer.prefix}.{name}"
        specs[f"{prefix}.plane"] = (torch.uint8, (experts, rows, plane_bytes(columns)))
        if chunk == 0 or settings.scale_layout == PER_CHUNK:
            specs[f"{prefix}.scale"] = (torch.float16, (experts, rows, groups))
        if chunk == 0:
            specs[f"{prefix}.offset"] = (torch.float16, (experts, rows, groups))
    if chunk == 0:
        specs[f"{layer.prefix}.gain"] = (torch.float32, (experts, 3, NUM_TIERS))
    return specs


def chunk_files(
    layers: list[LayerShape], settings: CheckpointSettings, chunk: int
) -> dict[str, list[LayerShape]]:
    """File name -> layers in it; one file unless the chunk is over ``SHARD_BYTES``."""
    shards: list[list[LayerShape]] = [[]]
    filled = 0
    for layer in layers:
        size = sum(
            torch.Size(shape).numel() * dtype.itemsize
            for dtype, shape in chunk_specs(layer, settings, chunk).values()
        )
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(layer)
        filled += size
    if len(shards) == 1:
        return {f"{DPA_FOLDER}/chunk-{chunk}.safetensors": shards[0]}
    total = len(shards)
    return {
        f"{DPA_FOLDER}/chunk-{chunk}-{i + 1:05d}-of-{total:05d}.safetensors": shard
        for i, shard in enumerate(shards)
    }


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_file(path: Path) -> FileRecord:
    return FileRecord(size=path.stat().st_size, sha256=sha256_of(path))


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it over ``path``."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically."""

    def write(partial: Path) -> None:
        partial.write_text(json.dumps(value, indent=1) + "\n")

    replace_file(path, write)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DpaError: absent, unreadable or not an object; ``what`` says what the file is for.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise DpaError(f"{path} is missing: {what}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DpaError(f"{path} cannot be read ({error}): {what}") from None
    if not isinstance(value, dict):
        raise DpaError(f"{path} is not a JSON object: {what}")
    return value


def check_finite(tensor: Tensor, where: str, *, non_negative: bool = False) -> None:
    """Raise DpaError naming the first expert (dimension 0) with a NaN, an Inf or, if asked, a
    negative value."""
    bad = ~torch.isfinite(tensor)
    if non_negative:
        bad |= tensor < 0
    if bool(bad.any()):
        expert = int(bad.flatten(1).any(1).nonzero()[0])
        value = float(tensor[expert][bad[expert]][0])
        raise DpaError(
            f"{where}, expert {expert}: value {value} is not allowed; the file is damaged, copy it "
            "again or encode the model again"
        )


@dataclass(frozen=True)
class Residuals:
    """``dpa/residuals.safetensors``.

    Attributes:
        r: fp32 [L, E, 9], mean squared error of the expert's output at tier k, as measured;
            entries with k < min_chunks are 0 and unused.
        counts: int64 [L, E], calibration tokens routed to the expert.
        stderr: fp32 [L, E, 9], standard error of ``r`` over the tokens measured; None where it is not
            stored.
    """

    r: Tensor
    counts: Tensor
    stderr: Tensor | None = None


class CheckpointReader:
    """A validated, encoded checkpoint.

    The constructor reads config.json and the manifest and checks that the first ``max_chunks`` chunk
    files are there with the right sizes; it opens none of them.

    Raises:
        DpaError: anything is missing, damaged or does not fit together.
    """

    def __init__(self, path: Path, max_chunks: int = NUM_CHUNKS) -> None:
        self.path = Path(path)
        self.max_chunks = max_chunks
        if not self.path.is_dir():
            raise DpaError(f"{self.path} is not a folder; give the folder of an encoded checkpoint")
        config = read_json(self.path / CONFIG, "a checkpoint needs the model's config.json")
        quantization = config.get("quantization_config")
        if not isinstance(quantization, dict) or quantization.get("quant_method") != "dpa-moe":
            raise DpaError(
                f"{self.path} is not encoded for dpa-moe; run: vllm-dpa encode {self.path} OUT"
            )
        self.settings = CheckpointSettings.parse(quantization, f"{self.path}/{CONFIG}")
        self.manifest = self._read_manifest()
        self.layers = {layer.prefix: layer for layer in self.manifest.layers}
        self._file_of = {
            (layer.prefix, chunk): name
            for chunk in range(max_chunks)
            for name, part in chunk_files(self.manifest.layers, self.settings, chunk).items()
            for layer in part
        }
        for name in self.files_in_use():
            self._check_size(name)
        self._open: dict[str, Any] = {}

    def _read_manifest(self) -> Manifest:
        raw = read_json(
            self.path / MANIFEST,
            "an encoded checkpoint needs its manifest; copy the whole dpa folder",
        )
        if raw.get("format_version") != FORMAT_VERSION:
            raise DpaError(
                f"{self.path / MANIFEST}: format_version {raw.get('format_version')!r} is unknown, "
                f"this vllm-dpa reads version {FORMAT_VERSION}; install a matching vllm-dpa or "
                "encode the model again"
            )
        try:
            manifest = Manifest.model_validate(raw)
        except ValidationError as error:
            raise one_line(error, str(self.path / MANIFEST)) from None
        if manifest.settings != self.settings:
            raise DpaError(
                f"{self.path}: quantization_config in config.json and settings in {MANIFEST} "
                "differ; the files come from different encodes, copy the checkpoint again"
            )
        return manifest

    def files_in_use(self) -> list[str]:
        """Chunk files of the first ``max_chunks`` chunks, and the residuals where profiled."""
        names = list(dict.fromkeys(self._file_of.values()))
        if RESIDUALS in self.manifest.files:
            names.append(RESIDUALS)
        return names

    def _check_size(self, name: str) -> None:
        record = self.manifest.files.get(name)
        if record is None:
            raise DpaError(
                f"{self.path / MANIFEST} has no record of {name}; encode the model again"
            )
        path = self.path / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DpaError(
                f"{path} is missing; copy it again{self._smaller_max_chunks(name)}"
            ) from None
        if size != record.size:
            raise DpaError(
                f"{path} has {size} bytes, the manifest says {record.size}: the copy is incomplete "
                "or damaged; copy it again"
            )

    def _smaller_max_chunks(self, name: str) -> str:
        chunk = int(name.removeprefix("dpa/chunk-")[0]) if "chunk-" in name else 0
        return f", or load fewer chunks with max_chunks {chunk}" if chunk >= MIN_CHUNKS else ""

    def verify_hashes(
        self, names: list[str] | None = None, advance: Callable[[int], None] | None = None
    ) -> None:
        """Compare files with their SHA-256; by default those in use.

        Raises:
            DpaError: a file differs.
        """
        for name in self.files_in_use() if names is None else names:
            self._check_size(name)
            record = self.manifest.files[name]
            digest = sha256_of(self.path / name)
            if digest != record.sha256:
                raise DpaError(
                    f"{self.path / name}: SHA-256 is {digest[:16]}..., the manifest says "
                    f"{record.sha256[:16]}...: the file is damaged or not the one that was encoded; "
                    "copy it again"
                )
            if advance is not None:
                advance(record.size)

    def layer(self, prefix: str) -> LayerShape:
        """Raises DpaError if the layer was not encoded."""
        if prefix not in self.layers:
            raise DpaError(
                f"{self.path}: layer {prefix} is not in the checkpoint (it has "
                f"{', '.join(sorted(self.layers))}); encode the model again"
            )
        return self.layers[prefix]

    def layer_chunks(self, prefix: str) -> Iterator[dict[str, Tensor]]:
        """Tensors of the first ``max_chunks`` chunks by name without the layer prefix, chunk by chunk.

        Raises:
            DpaError: a tensor is missing, misshapen or has a value that cannot be right.
        """
        layer = self.layer(prefix)
        for chunk in range(self.max_chunks):
            file = self._file_of[prefix, chunk]
            self._open.pop(
                file, None
            )  # what is mapped of the layers before counts as this process's memory
            parts: dict[str, Tensor] = {}
            for name, (dtype, shape) in chunk_specs(layer, self.settings, chunk).items():
                tensor = self._tensor(file, name, dtype, shape)
                if dtype.is_floating_point:
                    check_finite(
                        tensor,
                        f"{self.path / file}: {name}",
                        non_negative=name.endswith(".scale"),
                    )
                parts[name.removeprefix(f"{prefix}.")] = tensor
            yield parts

    def _tensor(self, file: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        path = self.path / file
        handle = self._handle(file)
        if name not in handle.keys():  # noqa: SIM118 (not a mapping)
            raise DpaError(f"{path}: tensor {name} is missing; encode the model again")
        part = handle.get_slice(name)
        found = (part.get_dtype(), tuple(part.get_shape()))
        if found != (DTYPE_NAMES[dtype], shape):
            raise DpaError(
                f"{path}: tensor {name} is {found[0]} {found[1]}, expected "
                f"{DTYPE_NAMES[dtype]} {shape}; encode the model again"
            )
        return handle.get_tensor(name)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DpaError(
                    f"{self.path / file} is not a readable safetensors file ({error}); copy it again"
                ) from None
        return self._open[file]

    def read_layer(self, prefix: str) -> tuple[PlaneStack, PlaneStack]:
        """(w13, w2) of one layer, the first ``max_chunks`` chunks, all experts."""
        layer = self.layer(prefix)
        parts: dict[str, list[Tensor]] = {}
        for chunk in self.layer_chunks(prefix):
            for name, tensor in chunk.items():
                parts.setdefault(name, []).append(tensor)
        return make_stacks(layer, self.settings, parts)

    def residuals(self) -> Residuals | None:
        """The residual table, or None where the checkpoint was not profiled.

        Raises:
            DpaError: the table does not fit the layers, or holds a value that cannot be right.
        """
        if RESIDUALS not in self.manifest.files:
            return None
        layers = self.manifest.layers
        experts = max(layer.num_experts for layer in layers)
        shape = (len(layers), experts)
        r = self._tensor(RESIDUALS, "r", torch.float32, (*shape, NUM_TIERS))
        counts = self._tensor(RESIDUALS, "counts", torch.int64, shape)
        for layer, table in zip(layers, r, strict=True):
            check_finite(table, f"{self.path / RESIDUALS}: r of {layer.prefix}", non_negative=True)
        return Residuals(r, counts)

    def require_residuals(self, mode: str) -> Residuals:
        """The residual table; DpaError where there is none, saying that ``mode`` needs one."""
        residuals = self.residuals()
        if residuals is None:
            raise DpaError(
                f"{self.path} has no residuals, which mode {mode} needs; run: vllm-dpa profile "
                f"{self.path} --reference MODEL --calibration FILE"
            )
        return residuals

    def write_residuals(self, residuals: Residuals, profile: dict[str, Any]) -> None:
        """Add or replace the residual table and its record in the manifest."""
        tensors = {"r": residuals.r.contiguous(), "counts": residuals.counts.contiguous()}
        if residuals.stderr is not None:
            tensors["stderr"] = residuals.stderr.contiguous()
        path = self.path / RESIDUALS
        replace_file(path, lambda partial: save_file(tensors, partial, {"format": "pt"}))
        self._open.pop(RESIDUALS, None)
        self.manifest.files[RESIDUALS] = record_file(path)
        self.manifest.profile = profile
        write_json(self.path / MANIFEST, self.manifest.model_dump())


def gain_blocks(gain: Tensor) -> dict[str, Tensor]:
    """Gains [E, 3, 9] by matrix: [E, 2, 9] of w13 (gate, up) and [E, 1, 9] of w2."""
    return {"w13": gain[:, :2], "w2": gain[:, 2:]}


def make_stacks(
    layer: LayerShape, settings: CheckpointSettings, parts: dict[str, list[Tensor]]
) -> tuple[PlaneStack, PlaneStack]:
    """Build (w13, w2) from tensors by name, in chunk order: ``w13.plane``, ..., ``gain``."""
    blocks = gain_blocks(parts["gain"][0])
    stacks = [
        PlaneStack(
            planes=parts[f"{name}.plane"],
            scales=parts[f"{name}.scale"],
            offset=parts[f"{name}.offset"][0],
            gain=blocks[name],
            columns=columns,
            group_size=settings.group_size,
            scale_layout=settings.scale_layout,
        )
        for name, (_, columns, _) in layer.matrices().items()
    ]
    return stacks[0], stacks[1]
