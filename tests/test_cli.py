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


@pytest.mark.parametrize("command", ["encode", "merge", "profile", "inspect", "evaluate"])
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
    assert facts["residuals"]["calibration"]["tokens"] == 1024

    table, plots = tmp_path / "new/rows.csv", tmp_path / "plots"
    result = run(*evaluate, "--scope", "token", "--csv", table, "--plots", plots)
    report = json.loads(result.stdout)
    assert len(table.read_text().splitlines()) == 1 + len(report["rows"])
    assert {p.name for p in plots.iterdir()} == {
        "frontier.png", "reduction.png", "layers.png", "gates.png"}  # fmt: skip
    assert [(row["mode"], row["k_bar"]) for row in report["rows"]] == [
        ("uniform", 2.0), ("uniform", 3.5), ("dpa", 2.0), ("dpa", 3.5)]  # fmt: skip
    assert set(report["rows"][0]) == {"mode", "scope", "dispatch_tokens", "k_bar", "kl", "kl_ci95",
                                      "perplexity", "top1_agreement",
                                      "bytes_read_per_token"}  # fmt: skip
    table = run("inspect", out, "--verify").stdout
    assert "files verified" in table


def test_calibrated_shards_merge_and_report(
    find_model: Callable[[str], Path], calibration_text: Path, tmp_path: Path
) -> None:
    model, out, report = find_model(NAME), tmp_path / "out", tmp_path / "report.html"
    encode = ("encode", model, out, "--calibration", calibration_text, "--calibration-tokens", 2048,
              "--target-tiers", "3,4", "--shard")  # fmt: skip
    for shard in ("1/2", "2/2"):
        result = run(*encode, shard)
        assert result.returncode == 0, result.stderr
        assert f"shard {shard}" in result.stderr
        assert not out.exists()
    result = run("merge", model, out, "--report", report)
    assert result.returncode == 0, result.stderr
    assert "4 MoE layers" in result.stderr
    assert "stage_b" in report.read_text()
    encoder = json.loads((out / "dpa/manifest.json").read_text())["encoder"]
    assert encoder["target_tiers"] == [3, 4]
    assert encoder["calibration"]["tokens"] == 2048
    notes = encoder["layers"]["model.layers.0.mlp.experts"]["calibration"]
    assert sum(notes["tokens_per_expert"]) == 4 * 2048
    assert run("inspect", out, "--verify", "--report", tmp_path / "again.html").returncode == 0
    assert (tmp_path / "again.html").read_text() == report.read_text()


def test_plan_writes_nothing(find_model: Callable[[str], Path], tmp_path: Path) -> None:
    result = run("encode", find_model(NAME), tmp_path / "out", "--plan", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["weights"] == 4 * 16 * 3 * 256 * 128
    assert not list(tmp_path.iterdir())
    text = run("encode", find_model(NAME), tmp_path / "out", "--plan").stdout
    assert "memory of one process" in text
    assert "free disk needed" in text


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
    out = tmp_path / "out"
    fails(run("encode", model, out, "--shard", "3/2"), "give I/N")
    fails(run("encode", model, out, "--refine"), "--calibration")
    fails(run("encode", model, out, "--device", "cuda:7"), "--device cuda:7 cannot be used")
    fails(run("encode", model, out, "--device", "abacus"), "--device abacus cannot be used")
    fails(run("encode", model, out, "--calibration", tmp_path / "no.txt"), "no.txt cannot be read")
    fails(run("encode", model, out, "--target-tiers", "4,3"), "target_tiers", "ascending")
    fails(run("merge", model, out), "encode all shards first")
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
