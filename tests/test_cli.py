# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-dpa`` command as a user runs it: output, exit codes, one-line errors."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_dpa import __version__

CLI = str(Path(sys.executable).with_name("vllm-dpa"))
NAME = "tiny-qwen2moe"


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLI, *map(str, args)], capture_output=True, text=True, check=False)


def fails(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 1 and a single line on stderr that holds all the words."""
    assert result.returncode == 1
    assert result.stderr.startswith("vllm-dpa: error: ")
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("command", ["encode", "profile", "inspect", "evaluate"])
def test_help_of_every_command(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert "Usage: vllm-dpa" in result.stdout


def test_version() -> None:
    assert run("--version").stdout.strip() == f"vllm-dpa {__version__}"


def test_encode_profile_inspect_evaluate(
    find_model: Callable[[str], Path], calibration_text: Path, heldout_text: Path, tmp_path: Path
) -> None:
    model, out = find_model(NAME), tmp_path / "out"
    result = run("encode", model, out, "--scale-layout", "geometric", "--tier-exponent", "0.25")
    assert result.returncode == 0, result.stderr
    assert "4 MoE layers" in result.stderr
    facts = json.loads(run("inspect", out, "--json").stdout)
    assert facts["residuals"] is None
    assert facts["encoder"]["tier_exponent"] == 0.25
    evaluate = ("evaluate", out, "--reference", model, "--text", heldout_text, "--k-bar", "2,3.5",
                "--max-tokens", "256", "--json")  # fmt: skip
    fails(run(*evaluate), "no residuals", "vllm-dpa profile")

    result = run("profile", out, "--reference", model, "--calibration", calibration_text,
                 "--max-tokens", "1024")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "residuals from 1024 tokens" in result.stderr

    facts = json.loads(run("inspect", out, "--verify", "--json").stdout)
    assert {"format_version", "scale_layout", "group_size", "num_chunks", "scale_overhead", "tiers",
            "layers"} <= set(facts)  # fmt: skip
    assert {"k", "bytes", "bits_per_weight", "sqnr_db"} <= set(facts["tiers"][0])
    assert [tier["k"] for tier in facts["tiers"]] == list(range(2, 9))
    assert facts["residuals"]["calibration_tokens"] == 1024

    report = json.loads(run(*evaluate, "--scope", "token").stdout)
    assert [(row["mode"], row["k_bar"]) for row in report["rows"]] == [
        ("uniform", 2.0), ("uniform", 3.5), ("dpa", 2.0), ("dpa", 3.5)]  # fmt: skip
    assert set(report["rows"][0]) == {"mode", "scope", "dispatch_tokens", "k_bar", "kl", "kl_ci95",
                                      "perplexity", "bytes_read_per_token"}  # fmt: skip
    table = run("inspect", out, "--verify").stdout
    assert "files verified" in table


def test_wrong_hash_is_found_by_verify(qwen_copy: Path) -> None:
    path = qwen_copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert run("inspect", qwen_copy).returncode == 0
    fails(run("inspect", qwen_copy, "--verify"), "model.safetensors", "SHA-256")


def test_bad_input(find_model: Callable[[str], Path], qwen_copy: Path, tmp_path: Path) -> None:
    model = find_model(NAME)
    fails(run("inspect", tmp_path / "nowhere"), "nowhere is not a folder")
    fails(run("encode", tmp_path / "nowhere", tmp_path / "out"), "nowhere is not a folder")
    fails(run("encode", model, qwen_copy), "exists")
    fails(run("encode", model, tmp_path / "out", "--group-size", 48), "group_size", "48")
    evaluate = ("evaluate", qwen_copy, "--reference", model, "--text")
    fails(run(*evaluate, tmp_path / "nowhere"), "cannot be read as UTF-8 text")
    fails(
        run(*evaluate, model / "config.json", "--k-bar", "9"), "k_bars", "less than or equal to 8"
    )
    fails(run(*evaluate, model / "config.json", "--modes", "magic"), "modes", "magic")


@pytest.mark.parametrize(
    "args",
    [["encode"], ["inspect", "x", "--colour"], ["evaluate", "x", "--reference", "y", "--text", "z",
     "--k-bar", "a,b"], ["encode", "x", "y", "--scale-layout", "zigzag"]],
    ids=["missing-argument", "unknown-option", "not-numbers", "not-a-layout"],
)  # fmt: skip
def test_bad_usage_is_exit_code_2(args: list[str]) -> None:
    result = run(*args)
    assert result.returncode == 2
    assert "Usage:" in result.stderr
