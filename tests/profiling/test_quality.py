# SPDX-License-Identifier: Apache-2.0
"""The figures that the encoder and the allocator must reach on trained models and held-out text.

Bounds are stated with the project's requirements. A simulation that shares no code with this repository
reached the SQNR below, and 41, 35 and 33 % less KL with per-token allocation at k-bar 3, 4, 5.
"""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.profiling.calibration import Calibration, CalibrationOptions, read_documents
from vllm_dpa.profiling.encode import encode, encode_shard, workspace_of
from vllm_dpa.profiling.evaluate import EvaluateOptions, Report, evaluate
from vllm_dpa.profiling.evaluation_plots import write_csv, write_plots
from vllm_dpa.profiling.fit.matrix import ErrorSums
from vllm_dpa.profiling.fitters import StageB
from vllm_dpa.profiling.inspection import inspect
from vllm_dpa.profiling.layer_fit import EncodeOptions
from vllm_dpa.profiling.reference_model import ReferenceModel
from vllm_dpa.profiling.residuals import ProfileOptions, profile
from vllm_dpa.profiling.source import SourceCheckpoint
from vllm_dpa.profiling.workspace import Shard

OLMOE_SQNR_DB = {2: 8.6, 3: 14.6, 4: 20.6, 5: 26.4, 6: 31.9, 7: 36.7, 8: 40.2}
UNIFORM_KL = {2.0: 0.032, 3.0: 0.0075, 4.0: 0.0022, 5.0: 0.0008, 6.0: 0.00035, 8.0: 0.00015}
REDUCTION = {3.0: 0.35, 4.0: 0.30, 5.0: 0.25}
BITS = {
    "per_chunk": lambda k: 1.125 * k + 0.125,
    "geometric": lambda k: k + 0.25,
}
OVERHEAD = {"per_chunk": 1 / 9, "geometric": 1 / 65}


def test_sqnr_of_stage_a_is_the_simulations(
    find_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """On the first of six layers, which is within 0.2 dB of all of them."""
    options = EncodeOptions(scale_layout="per_chunk", tier_exponent=0.25)
    model, out = find_model("tiny-olmoe"), tmp_path / "out"
    encode_shard(model, out, options, shard=Shard(1, 6))
    errors = workspace_of(out).errors(SourceCheckpoint(model).layers[0]).tensors
    sums = ErrorSums()
    sums.add(errors["error"].sum(0), errors["error_with_gain"].sum(0), float(errors["power"].sum()))
    sqnr = sums.sqnr_db(sums.error)
    for k, expected in OLMOE_SQNR_DB.items():
        assert sqnr[k - 1] == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("layout", ["per_chunk", "geometric"])
def test_sizes(encoded: Callable[..., Path], layout: str) -> None:
    options = EncodeOptions(scale_layout=layout)
    facts = inspect(CheckpointReader(encoded("tiny-qwen2moe", options)))
    assert facts["scale_overhead"] == pytest.approx(OVERHEAD[layout])
    for tier in facts["tiers"]:
        assert tier["bits_per_weight"] == BITS[layout](tier["k"])
    values = [tier["sqnr_db"] for tier in facts["tiers"]]
    assert values == sorted(values)


def test_measured_sqnr_is_what_the_manifest_says(
    encoded: Callable[..., Path], find_model: Callable[[str], Path]
) -> None:
    """From the files as kernels decode them, against the source weights."""
    reader = CheckpointReader(encoded("tiny-qwen2moe"))
    said = inspect(reader)["tiers"]
    measured = inspect(reader, SourceCheckpoint(find_model("tiny-qwen2moe")))["tiers"]
    for a, b in zip(said, measured, strict=True):
        assert a["sqnr_db"] == pytest.approx(b["sqnr_db"], abs=1e-3)
        assert a["sqnr_db_with_gain"] == pytest.approx(b["sqnr_db_with_gain"], abs=1e-3)


@pytest.fixture(scope="module")
def olmoe_report(
    tmp_path_factory: pytest.TempPathFactory,
    load_reference: Callable[[str], ReferenceModel],
    find_model: Callable[[str], Path],
) -> Report:
    """Defaults of the encoder with calibration; 3,072 tokens that the model was never trained on."""
    path, out = find_model("tiny-olmoe"), tmp_path_factory.mktemp("quality") / "out"
    texts = path.parent.parent / "text"
    source = SourceCheckpoint(path)
    inputs = Calibration(
        source,
        read_documents(str(texts / "calibration.txt")),
        CalibrationOptions(),
        torch.device("cpu"),
    )
    encode(path, out, EncodeOptions(), StageB(inputs))
    checkpoint = CheckpointReader(out)
    checkpoint.write_residuals(*profile(checkpoint, source, inputs, ProfileOptions()))
    options = EvaluateOptions(
        scope="token", dispatch_tokens=(1,), k_bars=(2, 3, 4, 5, 6, 8), activations="int16"
    )
    model = load_reference("tiny-olmoe")
    windows = model.windows(texts / "heldout.txt", 256, 3072)
    return evaluate(CheckpointReader(out), model, windows, options)


def test_uniform_kl_is_low(olmoe_report: Report) -> None:
    kl = {row.k_bar: row.kl for row in olmoe_report.rows if row.mode == "uniform"}
    for k, bound in UNIFORM_KL.items():
        assert kl[k] <= bound


def test_allocation_beats_uniform_at_equal_budget(olmoe_report: Report) -> None:
    rows = {(row.mode, row.k_bar): row for row in olmoe_report.rows}
    for k, reduction in REDUCTION.items():
        uniform, dpa = rows["uniform", k], rows["dpa", k]
        assert dpa.kl <= (1 - reduction) * uniform.kl
        # One token a dispatch: equal chunks are then equal bytes.
        assert dpa.bytes_read_per_token == pytest.approx(uniform.bytes_read_per_token)


@pytest.mark.parametrize("k_bar", [2.0, 8.0])
def test_extreme_budgets_leave_nothing_to_allocate(olmoe_report: Report, k_bar: float) -> None:
    rows = {(row.mode, row.k_bar): row for row in olmoe_report.rows}
    assert rows["dpa", k_bar].kl == rows["uniform", k_bar].kl


def test_evaluation_in_scope_dispatch(
    encoded: Callable[..., Path],
    load_reference: Callable[[str], ReferenceModel],
    heldout_text: Path,
) -> None:
    """Dispatches of two sizes in one run; a single sequence has no confidence interval."""
    checkpoint, model = CheckpointReader(encoded("tiny-qwen2moe")), load_reference("tiny-qwen2moe")
    windows = model.windows(heldout_text, 256, 256)
    options = EvaluateOptions(k_bars=(3,), dispatch_tokens=(4, 256))
    report = evaluate(checkpoint, model, windows, options)
    rows = {(row.mode, row.dispatch_tokens): row for row in report.rows}
    for size in (4, 256):
        assert rows["uniform", size].kl_ci95 is None
        assert rows["dpa", size].kl < rows["uniform", size].kl
        assert 0.9 < rows["dpa", size].top1_agreement <= 1
    assert rows["uniform", 4].kl == rows["uniform", 256].kl
    # Larger dispatches share reads.
    assert rows["uniform", 256].bytes_read_per_token < rows["uniform", 4].bytes_read_per_token
    stored = sum(
        la.num_experts * la.expert_bytes(8, checkpoint.settings)
        for la in checkpoint.manifest.layers
    )
    assert report.stored_bytes == stored


def test_evaluation_counts_where_chunks_went(
    encoded: Callable[..., Path],
    load_reference: Callable[[str], ReferenceModel],
    heldout_text: Path,
) -> None:
    """In scope token every token spends its budget, and larger gates get more of it."""
    checkpoint, model = CheckpointReader(encoded("tiny-qwen2moe")), load_reference("tiny-qwen2moe")
    windows = model.windows(heldout_text, 64, 128)
    options = EvaluateOptions(k_bars=(3.5,), scope="token", dispatch_tokens=(1,))
    report = evaluate(checkpoint, model, windows, options)
    k = torch.arange(9)
    for row, allocation in zip(report.rows, report.allocations, strict=True):
        assert allocation.by_layer.sum(1).tolist() == [128 * 4] * 4
        assert allocation.by_rank.sum(1).tolist() == [128 * 4] * 4
        spent = allocation.by_layer @ k
        if row.mode == "uniform":
            assert allocation.by_layer[:, 4].tolist() == [128 * 4] * 4
        else:
            assert spent.tolist() == [128 * 14] * 4
            mean = (allocation.by_rank @ k).tolist()
            assert mean == sorted(mean, reverse=True)
            assert mean[0] > mean[3]


def test_evaluation_is_written_as_csv_and_plots(
    encoded: Callable[..., Path],
    load_reference: Callable[[str], ReferenceModel],
    heldout_text: Path,
    tmp_path: Path,
) -> None:
    checkpoint, model = CheckpointReader(encoded("tiny-qwen2moe")), load_reference("tiny-qwen2moe")
    options = EvaluateOptions(k_bars=(3, 4), scope="token", dispatch_tokens=(1,))
    report = evaluate(checkpoint, model, model.windows(heldout_text, 64, 128), options)
    write_csv(report, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["kl"]) for row in rows] == [row.kl for row in report.rows]
    for path in write_plots(report, tmp_path / "plots"):
        assert path.read_bytes().startswith(b"\x89PNG")
