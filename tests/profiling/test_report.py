# SPDX-License-Identifier: Apache-2.0
"""The report: every tier, layer and plot is in it, and the worst experts are the worst."""

import sys
from pathlib import Path

import pytest
import torch
from small_model import make_model

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.errors import DpaError
from vllm_dpa.profiling.calibration import LayerInputs
from vllm_dpa.profiling.encode import encode
from vllm_dpa.profiling.fitters import StageB
from vllm_dpa.profiling.layer_fit import EncodeOptions
from vllm_dpa.profiling.plan import SampleCalibration
from vllm_dpa.profiling.report import ExpertErrors, worst_experts, write_report
from vllm_dpa.profiling.source import SourceCheckpoint


@pytest.fixture(params=["stage_a", "stage_b"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> CheckpointReader:
    model = make_model(tmp_path / "model")
    shape = SourceCheckpoint(model).layers[0]
    torch.manual_seed(0)
    calibrated = StageB(SampleCalibration(200, shape, 4))
    fitter = calibrated if request.param == "stage_b" else None
    encode(model, tmp_path / "out", EncodeOptions(group_size=32), fitter)
    return CheckpointReader(tmp_path / "out")


def test_report_holds_tiers_layers_and_plots(checkpoint: CheckpointReader, tmp_path: Path) -> None:
    path = tmp_path / "new/report.html"
    write_report(checkpoint, path)
    text = path.read_text()
    for layer in checkpoint.layers:
        assert layer in text
    for tier in checkpoint.manifest.quality.tiers:
        assert f"{tier.sqnr_db:.2f}" in text
    assert text.count("data:image/png;base64,iVBOR") == 3
    assert ("output error, worst" in text) == (checkpoint.manifest.encoder["name"] == "stage_b")
    assert list(path.parent.iterdir()) == [path]


def test_worst_experts_come_first(checkpoint: CheckpointReader) -> None:
    errors = ExpertErrors.of(checkpoint)
    rows = worst_experts(checkpoint, errors)
    assert len(rows) == 8
    values = [row["error"] for row in rows]
    assert values == sorted(values, reverse=True)
    assert values[0] == float(errors.shown[..., 4].max())


def test_errors_fall_with_every_chunk(checkpoint: CheckpointReader) -> None:
    errors = ExpertErrors.of(checkpoint)
    assert (errors.weight[..., 3:].diff(dim=-1) < 0).all()


def test_missing_library_is_named(
    checkpoint: CheckpointReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DpaError, match=r"need matplotlib.*vllm-dpa\[report\]"):
        write_report(checkpoint, tmp_path / "report.html")


def test_sample_inputs_reach_every_expert() -> None:
    from vllm_dpa.checkpoint import LayerShape

    shape = LayerShape(prefix="a", num_experts=3, hidden_size=8, intermediate_size=4)
    inputs = SampleCalibration(12, shape, 1).inputs("a")
    assert isinstance(inputs, LayerInputs)
    assert inputs.counts().tolist() == [4, 4, 4]
