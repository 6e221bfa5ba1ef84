# SPDX-License-Identifier: Apache-2.0
"""Encoding a model folder: what is written, what is refused, and that nothing is left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import E, H, I, make_model
from torch import Tensor

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.errors import DpaError
from vllm_dpa.profiling.encode import encode
from vllm_dpa.profiling.layer_fit import EncodeOptions


def change_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


EXPERT = "model.layers.0.mlp.experts.2"


@pytest.mark.parametrize("layout", ["per_chunk", "geometric"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_everything_but_the_experts_is_unchanged(
    tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    source, out = make_model(tmp_path / "source", dtype), tmp_path / "out"
    encode(source, out, EncodeOptions(scale_layout=layout, group_size=32))
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "dpa", "model.safetensors", "tokenizer.json"]  # fmt: skip
    before, after = (load_file(p / "model.safetensors") for p in (source, out))
    assert set(after) == {name for name in before if ".experts." not in name}
    assert all(torch.equal(after[name], before[name]) for name in after)
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "dpa-moe", "format_version": 1, "num_chunks": 8, "min_chunks": 2,
        "group_size": 32, "scale_layout": layout}  # fmt: skip
    assert config == json.loads((source / "config.json").read_text())
    CheckpointReader(out).verify_hashes()


def test_sharded_source_keeps_its_shards_and_index(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    (model / "model.safetensors").unlink()
    weight_map = {n: f"model-{1 + (i % 2)}.safetensors" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, model / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    encode(model, tmp_path / "out", EncodeOptions())
    kept = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert kept == {n: f for n, f in weight_map.items() if ".experts." not in n}
    for name, file in kept.items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[name])


def test_encoding_twice_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    manifests = [encode(model, tmp_path / name, EncodeOptions()) for name in ("a", "b")]
    assert manifests[0] == manifests[1]


def test_existing_output_is_left_alone(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("keep")
    with pytest.raises(DpaError, match="exists; remove it or choose another"):
        encode(model, out, EncodeOptions())
    assert (out / "precious").read_text() == "keep"


def refused(model: Path, message: str) -> None:
    """Encoding fails with the message and leaves nothing behind."""
    out = model.parent / "out"
    before = sorted(model.parent.iterdir())
    with pytest.raises(DpaError, match=message):
        encode(model, out, EncodeOptions())
    assert sorted(model.parent.iterdir()) == before


def test_nan_weight_is_refused_without_a_trace(model: Path) -> None:
    change_weights(model, lambda t: t[f"{EXPERT}.up_proj.weight"][0].fill_(float("nan")))
    refused(model, rf"{EXPERT}\.up_proj\.weight holds NaN or Inf")


def test_missing_expert_is_refused(model: Path) -> None:
    change_weights(model, lambda t: t.pop(f"{EXPERT}.down_proj.weight"))
    refused(model, r"layers\.0\.mlp\.experts, expert 2: down_proj is missing")


def test_extra_expert_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"num_experts": E - 1}
    (model / "config.json").write_text(json.dumps(config))
    refused(model, r"has expert 3, but config\.json says 3")


def test_odd_shape_is_refused(model: Path) -> None:
    change_weights(model, lambda t: t.update({f"{EXPERT}.up_proj.weight": torch.ones(I, H + 1)}))
    refused(model, rf"{EXPERT}\.up_proj\.weight has shape")


def test_weights_beyond_fp16_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", torch.float32)
    change_weights(model, lambda t: t[f"{EXPERT}.up_proj.weight"].mul_(1e6))
    refused(model, r"experts, expert 2: weights beyond the range of fp16")


def test_integer_weights_are_refused(model: Path) -> None:
    name = f"{EXPERT}.up_proj.weight"
    change_weights(model, lambda t: t.update({name: torch.ones(I, H, dtype=torch.int8)}))
    refused(model, r"is torch\.int8; only bf16, fp16, fp32 and fp8")


def test_model_without_moe_layer_is_refused(model: Path) -> None:
    change_weights(model, lambda t: [t.pop(n) for n in list(t) if ".experts." in n])
    refused(model, "has no MoE layer with routed experts")


def test_unknown_family_is_refused_by_name(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": "mystery_moe"}
    (model / "config.json").write_text(json.dumps(config))
    refused(model, "'mystery_moe' is not supported; supported are olmoe, qwen2_moe, qwen3_moe")


def test_quantised_model_is_refused(model: Path, tmp_path: Path) -> None:
    encode(model, tmp_path / "once", EncodeOptions())
    with pytest.raises(DpaError, match="already quantised"):
        encode(tmp_path / "once", tmp_path / "twice", EncodeOptions())


def test_folder_without_safetensors_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(model, r"has no \*\.safetensors weights")


def test_truncated_source_is_refused(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(model, r"model\.safetensors cannot be read")


def test_interrupted_encode_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(model, model.parent / "out", EncodeOptions(), advance=stop)
    assert [p.name for p in model.parent.iterdir()] == ["model"]


def test_all_zero_and_constant_experts(model: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERT}.up_proj.weight"].zero_()
        tensors[f"{EXPERT}.down_proj.weight"].fill_(0.5)

    change_weights(model, change)
    encode(model, tmp_path / "out", EncodeOptions())
    from vllm_dpa.kernels.reference import decode

    w13, w2 = CheckpointReader(tmp_path / "out").read_layer("model.layers.0.mlp.experts")
    for k in (2, 8):
        assert torch.equal(decode(w13, 2, k)[I:], torch.zeros(I, H, dtype=torch.float64))
        assert torch.allclose(decode(w2, 2, k), torch.tensor(0.5, dtype=torch.float64), rtol=1e-3)


def test_source_copy_is_not_needed_afterwards(model: Path, tmp_path: Path) -> None:
    encode(model, tmp_path / "out", EncodeOptions())
    shutil.rmtree(model)
    reader = CheckpointReader(tmp_path / "out")
    assert [len(reader.read_layer(p)[0].planes) for p in reader.layers] == [8, 8]
