# SPDX-License-Identifier: Apache-2.0
"""``vllm-dpa bench`` and ``kernels``: what they print, not how fast anything is."""

import json
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from vllm_dpa.benchmarks import cpu_moe
from vllm_dpa.cli import app
from vllm_dpa.kernels.cpu import native


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu_moe.SHAPES, "olmoe", cpu_moe.Shape(128, 64, 4, 2))
    monkeypatch.setattr(cpu_moe, "ROOF_BYTES", 2**22)


def test_rows_have_the_documented_keys() -> None:
    options = ["--tokens", "1,3", "--k", "2,8", "--pairs", "2", "--json"]
    result = CliRunner().invoke(app, ["bench", "cpu", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 2 * 2 * 2  # layouts, tokens, k
    for row in rows:
        assert set(row) == {field.name for field in fields(cpu_moe.Row)}
        assert row["isa"] == native.active_isa()
        assert row["ms"] > 0
        assert row["gb_per_s"] > 0
    assert {(row["layout"], row["tokens"], row["k"]) for row in rows} == {
        (layout, tokens, k)
        for layout in ("per_chunk", "geometric")
        for tokens in (1, 3)
        for k in (2, 8)
    }


@pytest.mark.parametrize(
    "wrong", [["--k", "9"], ["--layouts", "both"], ["--tokens", "1.5"], ["--isas", "mmx"]]
)
def test_wrong_options_are_refused(wrong: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", "cpu", *wrong]).exit_code == 2


def test_kernels_says_what_is_active() -> None:
    result = CliRunner().invoke(app, ["kernels", "--json"])
    facts = json.loads(result.stdout)
    assert facts["cpu_isa"] == native.active_isa()
    assert facts["cpu_isas"] == native.available_isas()
