# SPDX-License-Identifier: Apache-2.0
"""What serving refuses: at start, with one message that says what, where and what to do.

Most cases build vLLM's engine configuration in this process, which is the server's own first step;
three start the real command, to see what a user sees.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from vllm_dpa import vllm_seams
from vllm_dpa.checkpoint import record_file
from vllm_dpa.errors import DpaError
from vllm_dpa.runtime import WorkerState
from vllm_dpa.settings import RuntimeOptions

pytestmark = pytest.mark.serve


def configure(checkpoint: Path, options: object = None, **engine: Any) -> Any:
    """vLLM's configuration of a server, as ``vllm serve`` makes it."""
    config = {} if options is None else {"dpa_moe": options}
    return EngineArgs(
        model=str(checkpoint), additional_config=config, max_model_len=256, **engine
    ).create_engine_config()


def refused(checkpoint: Path, *words: str, options: object = None, **engine: Any) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (pydantic wraps some of them)
        configure(checkpoint, options, **engine)
    for word in words:
        assert word in str(error.value)


def drop_from_manifest(folder: Path, name: str) -> None:
    path = folder / "dpa/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][name]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("quantization", ["dpa-moe", None], ids=["by-flag", "autodetected"])
def test_encoded_model_is_accepted(qwen_copy: Path, quantization: str | None) -> None:
    config = configure(qwen_copy, {"k_bar": 3.5}, quantization=quantization)
    assert config.model_config.quantization == "dpa-moe"
    assert config.quant_config.settings.group_size == 128


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k_bar": 1.5}, ["k_bar", "greater than or equal to 2", "1.5"]),
        ({"k_bar": 8.5}, ["k_bar", "less than or equal to 8"]),
        ({"k_bar": "4"}, ["k_bar", "'4'"]),
        ({"k_bar": float("nan")}, ["k_bar", "nan"]),
        ({"kbar": 4.0}, ["kbar: unknown option", "known options: k_bar, mode, scope"]),
        ({"mode": "fast"}, ["mode", "'dpa', 'uniform', 'gate_only' or 'residual_only'"]),
        ({"scope": "layer"}, ["scope", "'dispatch' or 'token'"]),
        ({"max_chunks": 1}, ["max_chunks", "greater than or equal to 2"]),
        ({"max_chunks": 9}, ["max_chunks", "less than or equal to 8"]),
        ({"max_chunks": 4.5}, ["max_chunks", "4.5"]),
        ({"activations": "fp8"}, ["activations", "'int8' or 'int16'"]),
        ({"k_bar": 5.0, "max_chunks": 4}, ["k_bar 5 is more than max_chunks 4"]),
        ([4.0], ["must be an object of options"]),
    ],
    ids=str,
)  # fmt: skip
def test_bad_options(qwen_copy: Path, options: object, words: list[str]) -> None:
    refused(qwen_copy, "--additional-config dpa_moe", *words, options=options)


def test_misspelt_option_key(qwen_copy: Path) -> None:
    with pytest.raises(DpaError, match="unknown key 'dpa-moe'; did you mean 'dpa_moe'"):
        EngineArgs(
            model=str(qwen_copy), additional_config={"dpa-moe": {}}, max_model_len=256
        ).create_engine_config()


def test_default_budget_follows_a_small_max_chunks(qwen_copy: Path) -> None:
    configure(qwen_copy, {"max_chunks": 3})
    assert RuntimeOptions(max_chunks=3).initial_k_bar == 3.0


def test_damaged_checkpoint(qwen_copy: Path) -> None:
    (qwen_copy / "dpa/chunk-6.safetensors").unlink()
    refused(qwen_copy, "chunk-6.safetensors is missing", "max_chunks 6")
    configure(qwen_copy, {"max_chunks": 6})


def test_unknown_format_version(qwen_copy: Path) -> None:
    path = qwen_copy / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["format_version"] = 7
    path.write_text(json.dumps(config))
    refused(qwen_copy, "format_version 7 is unknown", "encode the model again")


def test_residual_only_needs_residuals(qwen_copy: Path) -> None:
    drop_from_manifest(qwen_copy, "dpa/residuals.safetensors")
    refused(qwen_copy, "has no residuals", "vllm-dpa profile", options={"mode": "residual_only"})


def test_dpa_without_residuals_serves_as_gate_only_with_a_warning(
    qwen_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drop_from_manifest(qwen_copy, "dpa/residuals.safetensors")
    configure(qwen_copy)
    state = WorkerState.open(qwen_copy, RuntimeOptions())
    assert state.mode == "gate_only"
    warnings = [
        r.getMessage()
        for r in caplog.records
        if r.name == "vllm.vllm_dpa" and r.levelno == logging.WARNING
    ]
    assert len(warnings) == 1
    assert "has no residual table" in warnings[0]


@pytest.mark.parametrize(
    "engine", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str
)
def test_more_than_one_worker_is_refused(qwen_copy: Path, engine: dict[str, int]) -> None:
    refused(qwen_copy, "single worker", **engine)


def test_model_that_is_not_encoded(find_model: Callable[[str], Path]) -> None:
    words = ("is not encoded for dpa-moe", "vllm-dpa encode")
    refused(find_model("tiny-qwen2moe"), *words, quantization="dpa-moe")


def test_other_models_are_left_alone(find_model: Callable[[str], Path]) -> None:
    """Even with options that would be refused."""
    config = configure(find_model("tiny-qwen2moe"), {"k_bar": 99})
    assert config.model_config.quantization is None


def test_unsupported_vllm_is_named(qwen_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.29.1")
    with pytest.raises(Exception, match=r"vLLM 0\.29\.1; supported are versions >= 0\.30, < 0\.34"):
        configure(qwen_copy)


def test_moved_seam_is_named() -> None:
    import torch

    with pytest.raises(vllm_seams.SeamError, match=r"Module\.moe_config is not there in vLLM"):
        vllm_seams.experts_facts(torch.nn.Module())


def test_command_refuses_an_unencoded_model(
    find_model: Callable[[str], Path], refuse: Callable[..., str]
) -> None:
    output = refuse(find_model("tiny-qwen2moe"), {})
    assert "is not encoded for dpa-moe; run: vllm-dpa encode" in output


def test_command_refuses_a_wrong_hash(qwen_copy: Path, refuse: Callable[..., str]) -> None:
    path = qwen_copy / "dpa/chunk-7.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "chunk-7.safetensors: SHA-256 is" in refuse(qwen_copy, {})


def test_command_refuses_a_nan_scale(qwen_copy: Path, refuse: Callable[..., str]) -> None:
    """With size and hash in order: found while the layer is loaded, never at the first request."""
    name = "dpa/chunk-0.safetensors"
    tensors = {key: value.clone() for key, value in load_file(qwen_copy / name).items()}
    tensors["model.layers.3.mlp.experts.w13.scale"][9, 0, 0] = float("nan")
    (qwen_copy / name).unlink()
    save_file(tensors, qwen_copy / name)
    path = qwen_copy / "dpa/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = record_file(qwen_copy / name).model_dump()
    path.write_text(json.dumps(manifest))
    output = refuse(qwen_copy, {})
    assert "chunk-0.safetensors: model.layers.3.mlp.experts.w13.scale, expert 9" in output


def test_batch_invariance_needs_precision_that_does_not_depend_on_the_batch(
    qwen_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    refused(qwen_copy, "VLLM_BATCH_INVARIANT=1", '"scope": "token"', options={"scope": "dispatch"})
    configure(qwen_copy, {"scope": "token"})
    configure(qwen_copy, {"scope": "dispatch", "mode": "uniform"})
