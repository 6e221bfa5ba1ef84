# SPDX-License-Identifier: Apache-2.0
"""fp8 checkpoints with block scales encode like the weights they stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import make_model

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.reference import decode
from vllm_dpa.profiling.block_scales import FP8, dequantise
from vllm_dpa.profiling.encode import encode
from vllm_dpa.profiling.layer_fit import EncodeOptions
from vllm_dpa.profiling.source import SourceCheckpoint

BLOCK = (16, 32)


def to_fp8(path: Path) -> None:
    """Turn every matrix but the router and the embedding into scaled fp8, in place."""
    tensors = load_file(path / "model.safetensors")
    for name in list(tensors):
        if "experts" not in name:
            continue
        weight = tensors[name].float()
        rows, columns = (-(-n // b) for n, b in zip(weight.shape, BLOCK, strict=True))
        scale = torch.rand(rows, columns) + 0.5
        spread = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        tensors[name] = (weight / spread[: weight.shape[0], : weight.shape[1]]).to(FP8)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = make_model(tmp_path / "model")
    to_fp8(path)
    return path


def test_every_block_is_scaled() -> None:
    values = torch.arange(6.0).view(2, 3).to(FP8)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    out = dequantise(values, scale, (1, 2), "x")
    assert torch.equal(out, torch.tensor([[0.0, 1, 4], [12, 16, 40]]))


def test_encodes_like_its_dequantised_twin(model: Path, tmp_path: Path) -> None:
    source = SourceCheckpoint(model)
    twin = tmp_path / "twin"
    twin.mkdir()
    tensors = {n: source.tensor(n) for names in source.rest().values() for n in names}
    for layer in source.layers:
        for expert in range(layer.num_experts):
            w13, w2 = source.expert(layer.prefix, expert)
            gate, up = w13.chunk(2)
            for matrix, value in (("gate", gate), ("up", up), ("down", w2)):
                name = f"{layer.prefix}.{expert}.{matrix}_proj.weight"
                tensors[name] = value.contiguous()
    save_file(tensors, twin / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps(config))
    for path, out in ((model, "a"), (twin, "b")):
        encode(path, tmp_path / out, EncodeOptions(group_size=32))
    a, b = (CheckpointReader(tmp_path / out) for out in ("a", "b"))
    for prefix in a.layers:
        for ours, theirs in zip(a.read_layer(prefix), b.read_layer(prefix), strict=True):
            assert torch.equal(decode(ours, 1, 5), decode(theirs, 1, 5))


def test_rest_is_written_without_scales(model: Path, tmp_path: Path) -> None:
    encode(model, tmp_path / "out", EncodeOptions())
    kept = load_file(tmp_path / "out/model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in kept.values())
    assert not any("scale" in name or "experts." in name for name in kept)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "dpa-moe"


def test_missing_scale_is_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(DpaError, match=r"1\.up_proj\.weight is fp8, but .*_scale_inv is missing"):
        encode(model, model.parent / "out", EncodeOptions())


def test_scales_of_another_block_size_are_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [8, 8]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(DpaError, match=r"scales for a matrix of 24 x 40 in blocks of 8 x 8"):
        encode(model, model.parent / "out", EncodeOptions())


@pytest.mark.parametrize("quantization", [{"quant_method": "gptq"}, {"quant_method": "fp8"}])
def test_other_quantisations_are_refused(model: Path, quantization: dict[str, str]) -> None:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = quantization
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(DpaError, match=f"already quantised .{quantization['quant_method']}"):
        SourceCheckpoint(model)


def test_mixed_dtypes_are_taken(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name in list(tensors):
        if "up_proj" in name:
            tensors[name] = tensors[name].half()
        if "down_proj" in name:
            tensors[name] = tensors[name].float()
    save_file(tensors, model / "model.safetensors")
    encode(model, tmp_path / "out", EncodeOptions(group_size=32))
    CheckpointReader(tmp_path / "out").verify_hashes()
