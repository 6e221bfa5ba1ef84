# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint: what is accepted, and the one message for everything that is not.

Damage is done to a private copy of the encoded bundled model. Where the damage must get past the
manifest's size and hash (a bad value inside a well-formed file), the manifest is brought in line.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_dpa import checkpoint as format_module
from vllm_dpa.checkpoint import CheckpointReader, LayerShape, chunk_files, record_file
from vllm_dpa.checkpoint_parts import join_chunks, write_layer
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.planes import PlaneStack
from vllm_dpa.kernels.reference import decode
from vllm_dpa.settings import CheckpointSettings

PREFIX = "model.layers.1.mlp.experts"


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(folder: Path, name: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change tensors of a file and bring the manifest in line."""
    path = folder / name
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    record = record_file(path).model_dump()
    edit_json(folder / "dpa/manifest.json", lambda m: m["files"].update({name: record}))


def read_everything(folder: Path, max_chunks: int = 8) -> None:
    reader = CheckpointReader(folder, max_chunks)
    reader.verify_hashes()
    for prefix in reader.layers:
        reader.read_layer(prefix)
    reader.residuals()


def fails(folder: Path, *words: str, max_chunks: int = 8) -> None:
    """Reading fails with one line that holds all the words."""
    with pytest.raises(DpaError) as error:
        read_everything(folder, max_chunks)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_intact_checkpoint_is_read(qwen_copy: Path) -> None:
    read_everything(qwen_copy)


def test_missing_chunk_file(qwen_copy: Path) -> None:
    (qwen_copy / "dpa/chunk-5.safetensors").unlink()
    fails(qwen_copy, "dpa/chunk-5.safetensors is missing", "copy it again", "max_chunks 5")
    read_everything(qwen_copy, max_chunks=5)


def test_missing_chunk_below_the_minimum_suggests_no_smaller_load(qwen_copy: Path) -> None:
    (qwen_copy / "dpa/chunk-1.safetensors").unlink()
    with pytest.raises(DpaError, match=r"missing; copy it again$"):
        read_everything(qwen_copy)


@pytest.mark.parametrize("keep", [0, 100, -1], ids=["empty", "header-cut", "last-byte-cut"])
def test_truncated_chunk_file(qwen_copy: Path, keep: int) -> None:
    path = qwen_copy / "dpa/chunk-3.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    fails(qwen_copy, "chunk-3.safetensors has", "the manifest says", "copy it again")


def test_extended_chunk_file(qwen_copy: Path) -> None:
    path = qwen_copy / "dpa/chunk-3.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    fails(qwen_copy, "chunk-3.safetensors has", "the manifest says")


def test_flipped_bit_fails_the_hash(qwen_copy: Path) -> None:
    path = qwen_copy / "dpa/chunk-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fails(qwen_copy, "chunk-2.safetensors", "SHA-256", "copy it again")


def test_garbage_with_a_matching_manifest(qwen_copy: Path) -> None:
    path = qwen_copy / "dpa/chunk-2.safetensors"
    path.write_bytes(b"\xff" * 100)
    record = record_file(path).model_dump()
    edit_json(
        qwen_copy / "dpa/manifest.json",
        lambda m: m["files"].update({"dpa/chunk-2.safetensors": record}),
    )
    fails(qwen_copy, "chunk-2.safetensors is not a readable safetensors file")


@pytest.mark.parametrize("where", ["config.json", "dpa/manifest.json"])
@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_unknown_format_version(qwen_copy: Path, where: str, version: object) -> None:
    def change(value: dict[str, Any]) -> None:
        value.get("quantization_config", value)["format_version"] = version

    edit_json(qwen_copy / where, change)
    fails(qwen_copy, where, f"format_version {version!r} is unknown", "encode the model again")


@pytest.mark.parametrize(
    ("key", "value"),
    [("group_size", -1), ("group_size", 100), ("scale_layout", "zigzag"), ("num_chunks", 4),
     ("colour", "red")],
)  # fmt: skip
def test_bad_quantization_config(qwen_copy: Path, key: str, value: object) -> None:
    edit_json(qwen_copy / "config.json", lambda c: c["quantization_config"].update({key: value}))
    fails(qwen_copy, "quantization_config", key)


def test_config_and_manifest_disagree(qwen_copy: Path) -> None:
    edit_json(qwen_copy / "config.json", lambda c: c["quantization_config"].update(group_size=64))
    fails(qwen_copy, "differ", "different encodes")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "dpa/../../x", "a/b/c", ""])
def test_manifest_cannot_name_files_outside_its_folder(qwen_copy: Path, name: str) -> None:
    record = {"size": 1, "sha256": "0" * 64}
    edit_json(qwen_copy / "dpa/manifest.json", lambda m: m["files"].update({name: record}))
    fails(qwen_copy, "manifest.json", "files")


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_unreadable_manifest(qwen_copy: Path, content: str) -> None:
    (qwen_copy / "dpa/manifest.json").write_text(content)
    fails(qwen_copy, "manifest.json")


def test_missing_manifest(qwen_copy: Path) -> None:
    (qwen_copy / "dpa/manifest.json").unlink()
    fails(qwen_copy, "manifest.json is missing", "copy the whole dpa folder")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0], ids=str)
def test_impossible_scale_names_file_layer_and_expert(qwen_copy: Path, value: float) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}.w2.scale"][3, 5, 0] = value

    edit_tensors(qwen_copy, "dpa/chunk-0.safetensors", change)
    fails(qwen_copy, "chunk-0.safetensors", f"{PREFIX}.w2.scale", "expert 3", str(value))


def test_impossible_gain(qwen_copy: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}.gain"][7, 0, 4] = float("nan")

    edit_tensors(qwen_copy, "dpa/chunk-0.safetensors", change)
    fails(qwen_copy, f"{PREFIX}.gain", "expert 7", "nan")


def test_layer_missing_from_a_chunk(qwen_copy: Path) -> None:
    edit_tensors(qwen_copy, "dpa/chunk-4.safetensors", lambda t: t.pop(f"{PREFIX}.w13.plane"))
    fails(qwen_copy, "chunk-4.safetensors", f"{PREFIX}.w13.plane is missing")


def test_expert_missing_from_a_chunk(qwen_copy: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{PREFIX}.w13.plane"
        tensors[name] = tensors[name][:-1].clone()

    edit_tensors(qwen_copy, "dpa/chunk-4.safetensors", change)
    fails(qwen_copy, "chunk-4.safetensors", f"{PREFIX}.w13.plane", "(15, 256, 32)", "(16, 256, 32)")


def test_layer_missing_from_the_manifest(qwen_copy: Path) -> None:
    with pytest.raises(DpaError, match=r"layer model\.layers\.9\.mlp\.experts is not in the"):
        CheckpointReader(qwen_copy).read_layer("model.layers.9.mlp.experts")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9], ids=str)
def test_impossible_residual(qwen_copy: Path, value: float) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["r"][1, 2, 3] = value

    edit_tensors(qwen_copy, "dpa/residuals.safetensors", change)
    fails(qwen_copy, "residuals.safetensors", PREFIX, "expert 2")


def test_residuals_of_another_model(qwen_copy: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["r"] = torch.ones(6, 64, 9)

    edit_tensors(qwen_copy, "dpa/residuals.safetensors", change)
    fails(qwen_copy, "residuals.safetensors", "(6, 64, 9)", "(4, 16, 9)")


def test_absent_residuals_are_allowed(qwen_copy: Path) -> None:
    (qwen_copy / "dpa/residuals.safetensors").unlink()
    edit_json(
        qwen_copy / "dpa/manifest.json", lambda m: m["files"].pop("dpa/residuals.safetensors")
    )
    assert CheckpointReader(qwen_copy).residuals() is None


def test_folder_that_is_not_encoded(find_model: Callable[[str], Path], tmp_path: Path) -> None:
    fails(find_model("tiny-qwen2moe"), "is not encoded for dpa-moe", "vllm-dpa encode")
    fails(tmp_path, "config.json is missing")
    fails(tmp_path / "nowhere", "is not a folder")


def random_stack(layer: LayerShape, name: str, settings: CheckpointSettings) -> PlaneStack:
    rows, columns, blocks = layer.matrices()[name]
    experts, groups = layer.num_experts, -(-columns // settings.group_size)
    count = 8 if settings.scale_layout == "per_chunk" else 1
    return PlaneStack(
        planes=[torch.randint(0, 256, (experts, rows, -(-columns // 8)), dtype=torch.uint8)
                for _ in range(8)],
        scales=[torch.rand(experts, rows, groups).half() for _ in range(count)],
        offset=torch.randn(experts, rows, groups).half(),
        gain=torch.rand(experts, blocks, 9) + 0.5,
        columns=columns,
        group_size=settings.group_size,
        scale_layout=settings.scale_layout,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["per_chunk", "geometric"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("shards", [1, 2], ids=["one-file", "sharded"])
def test_round_trip_of_odd_shapes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    qwen_copy: Path,
    layout: str,
    group_size: int,
    shards: int,
) -> None:
    """Short last groups, two layers of unlike shape, chunk files split where they get too large."""
    if shards == 2:
        monkeypatch.setattr(format_module, "SHARD_BYTES", 1)
    settings = CheckpointSettings(group_size=group_size, scale_layout=layout)
    layers = [
        LayerShape(prefix="model.layers.0.mlp.experts", num_experts=3, hidden_size=100,
                   intermediate_size=36),
        LayerShape(prefix="model.layers.1.mlp.experts", num_experts=2, hidden_size=130,
                   intermediate_size=129),
    ]  # fmt: skip
    stacks = {
        layer.prefix: tuple(random_stack(layer, m, settings) for m in ("w13", "w2"))
        for layer in layers
    }
    parts = tmp_path / "parts"
    parts.mkdir()
    for layer in reversed(layers):
        write_layer(parts, layer, *stacks[layer.prefix])
    names = join_chunks(parts, tmp_path, layers, settings)
    assert not list(parts.iterdir())
    assert len(chunk_files(layers, settings, 0)) == shards

    shutil.copy(qwen_copy / "config.json", tmp_path)
    shutil.copy(qwen_copy / "dpa/manifest.json", tmp_path / "dpa")
    edit_json(
        tmp_path / "config.json",
        lambda c: c.update(quantization_config=settings.model_dump()),
    )
    files = {name: record_file(tmp_path / name).model_dump() for name in names}
    edit_json(
        tmp_path / "dpa/manifest.json",
        lambda m: m.update(
            settings=settings.model_dump(),
            layers=[layer.model_dump() for layer in layers],
            files=files,
        ),
    )
    for max_chunks in (8, 3):
        reader = CheckpointReader(tmp_path, max_chunks)
        reader.verify_hashes()
        for layer in layers:
            for written, read in zip(
                stacks[layer.prefix], reader.read_layer(layer.prefix), strict=True
            ):
                assert read.num_chunks == max_chunks
                for k in (2, max_chunks):
                    assert torch.equal(decode(read, 1, k), decode(written, 1, k))


def test_writer_refuses_a_nan(tmp_path: Path) -> None:
    settings = CheckpointSettings()
    layer = LayerShape(prefix="a.experts", num_experts=2, hidden_size=64, intermediate_size=32)
    w13, w2 = (random_stack(layer, m, settings) for m in ("w13", "w2"))
    w2.scales[4][1, 0, 0] = float("nan")
    with pytest.raises(DpaError, match=r"a\.experts\.w2\.scale, expert 1"):
        write_layer(tmp_path, layer, w13, w2)
    assert not list(tmp_path.iterdir())
