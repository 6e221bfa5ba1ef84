# SPDX-License-Identifier: Apache-2.0
"""Calibration: texts are read or refused, windows are deterministic, the layer-by-layer run sees what
the whole model sees, and experts with few tokens are filled up."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from vllm_dpa.errors import DpaError
from vllm_dpa.profiling.calibration import (
    Calibration,
    CalibrationOptions,
    LayerInputs,
    read_documents,
    token_windows,
)
from vllm_dpa.profiling.reference_model import ReferenceModel
from vllm_dpa.profiling.source import SourceCheckpoint

CPU = torch.device("cpu")
TEXT = "In the beginning God created the heaven and the earth. " * 400


class Words:
    """A tokenizer with a token per word."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_json_lines_and_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n')
    assert list(read_documents(str(tmp_path / "a.txt"))) == ["one two"]
    assert list(read_documents(str(tmp_path / "a.jsonl"))) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"texts": 1}\n', 'line 2: a record needs a string "text"'),
        ("a.jsonl", b'{"text": "x"}\n{oops\n', "line 2: not JSON"),
        ("a.txt", b"\xff\xfe", "cannot be read as UTF-8 text"),
        (None, b"", "cannot be read as UTF-8 text"),
    ],
)
def test_bad_texts_are_refused(
    tmp_path: Path, name: str | None, content: bytes, message: str
) -> None:
    path = tmp_path / (name or "absent.txt")
    if name is not None:
        path.write_bytes(content)
    with pytest.raises(DpaError, match=message):
        list(read_documents(str(path)))


def test_dataset_id_without_the_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DpaError, match="pip install datasets"):
        list(read_documents("someone/texts"))


def test_dataset_id_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not a dependency, so a stand-in with its signature takes its place."""
    asked: list[tuple[str, dict[str, object]]] = []

    class Datasets:
        @staticmethod
        def load_dataset(name: str, **options: object) -> list[dict[str, str]]:
            asked.append((name, options))
            return [{"text": "one"}, {"text": "two"}, {"content": "three"}]

    monkeypatch.setitem(__import__("sys").modules, "datasets", Datasets)
    documents = read_documents("someone/texts")
    assert [next(documents), next(documents)] == ["one", "two"]
    assert asked == [("someone/texts", {"split": "train", "streaming": True})]
    with pytest.raises(DpaError, match=r'record 2: a record needs a string "text"'):
        next(documents)


def test_windows_depend_on_the_seed_alone() -> None:
    words = " ".join("x" * (i % 50 + 1) for i in range(4000))
    options = CalibrationOptions(max_tokens=256, window=16)
    first, again = (token_windows(iter([words]), Words(), options) for _ in range(2))
    other = token_windows(iter([words]), Words(), options.model_copy(update={"seed": 1}))
    assert first.shape == (16, 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_too_short_text_is_refused() -> None:
    with pytest.raises(DpaError, match="has 2 tokens, one window needs 16"):
        token_windows(iter(["a b"]), Words(), CalibrationOptions(window=16))


def calibration(model: Path) -> Calibration:
    options = CalibrationOptions(max_tokens=512, window=64)
    return Calibration(SourceCheckpoint(model), iter([TEXT]), options, CPU)


def random_qwen3(path: Path, tokenizer_from: Path) -> Path:
    """A tiny random Qwen3-MoE with a dense second layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[1],
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / file, path)
    return path


@pytest.mark.parametrize("name", ["tiny-qwen2moe", "tiny-olmoe", "random-qwen3"])
def test_layer_by_layer_is_the_whole_model(name, find_model, tmp_path, one_thread) -> None:
    bundled = find_model("tiny-qwen2moe")
    model = random_qwen3(tmp_path, bundled) if name == "random-qwen3" else find_model(name)
    ours = calibration(model)
    reference = ReferenceModel.load(model)
    layers = SourceCheckpoint(model).layers
    for layer in layers:
        inputs = ours.inputs(layer.prefix)
        seen: list[tuple[torch.Tensor, ...]] = []
        module = reference.experts_module(layer)
        hook = module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[:2]))
        reference.logits(ours._windows)
        hook.remove()
        hidden, ids = seen[0]
        torch.testing.assert_close(inputs.hidden, hidden, rtol=1e-4, atol=1e-5)
        assert (inputs.ids.sort(1).values == ids.sort(1).values).float().mean() > 0.999
        assert int(inputs.counts().sum()) == inputs.ids.numel()


def test_layers_may_be_asked_for_in_any_order(find_model, one_thread) -> None:
    model = find_model("tiny-qwen2moe")
    first, last = (SourceCheckpoint(model).layers[i].prefix for i in (0, -1))
    ours = calibration(model)
    late, early = ours.inputs(last), ours.inputs(first)
    assert torch.equal(late.hidden, calibration(model).inputs(last).hidden)
    assert torch.equal(early.hidden, calibration(model).inputs(first).hidden)


def test_model_without_a_tensor_is_refused(find_model, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(find_model("tiny-qwen2moe"), path, ignore=shutil.ignore_patterns("text"))
    config = json.loads((path / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config["layer_types"] += ["full_attention"]
    (path / "config.json").write_text(json.dumps(config))
    source = SourceCheckpoint(path)
    ours = Calibration(source, iter([TEXT]), CalibrationOptions(max_tokens=64, window=64), CPU)
    past_the_end = source.layers[-1].prefix.replace(".3.", ".4.")
    with pytest.raises(DpaError, match=r"model\.layers\.4\..* is missing"):
        ours.inputs(past_the_end)


def layer_inputs(ids: list[list[int]], columns: int = 4) -> LayerInputs:
    tokens = len(ids)
    hidden = torch.arange(tokens * columns, dtype=torch.float32).view(tokens, columns)
    gates = torch.full((tokens, len(ids[0])), 0.5)
    return LayerInputs(hidden, torch.tensor(ids), gates, num_experts=3)


def test_expert_with_enough_tokens_has_its_own_alone() -> None:
    inputs = layer_inputs([[0, 1], [0, 2], [1, 0], [0, 1], [2, 1]])
    x, weights = inputs.of_expert(0)
    assert torch.equal(x, inputs.hidden[[0, 1, 2, 3]])
    assert torch.equal(weights, torch.full((4,), 0.5))


def test_expert_without_tokens_gets_the_layers() -> None:
    inputs = layer_inputs([[0], [0], [1], [0], [1]])
    x, weights = inputs.of_expert(2)
    assert torch.equal(x, inputs.hidden[[0, 1, 2, 4]])
    assert float(weights.sum()) == pytest.approx(1)


def test_expert_with_one_token_is_filled_up() -> None:
    inputs = layer_inputs([[0], [0], [2], [0], [1]])
    x, weights = inputs.of_expert(2)
    assert len(x) == 5
    assert float(weights[0]) == pytest.approx(0.25)
    assert float(weights[1:].sum()) == pytest.approx(0.75)
    assert inputs.record() == {
        "tokens_per_expert": [3, 1, 1],
        "filled_with_layer_tokens": [0, 1, 2],
    }


def test_gates_of_zero_count_as_no_token() -> None:
    inputs = layer_inputs([[0], [0], [0], [0], [1]])
    silent = LayerInputs(inputs.hidden, inputs.ids, torch.zeros_like(inputs.gates), 3)
    x, weights = silent.of_expert(0)
    assert torch.isfinite(weights).all()
    assert float(weights.sum()) == pytest.approx(1)
    assert len(x) == 8
