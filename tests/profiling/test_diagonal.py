# SPDX-License-Identifier: Apache-2.0
"""The check of the additive cost: its parts, and its verdict on a trained model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.profiling.calibration import (
    Calibration,
    CalibrationOptions,
    LayerInputs,
    read_documents,
)
from vllm_dpa.profiling.diagonal import (
    BUDGETS,
    _exact,
    _random_counts,
    check_diagonal,
    spearman,
)
from vllm_dpa.profiling.source import SourceCheckpoint

NAME = "tiny-qwen2moe"


def test_spearman_of_known_samples() -> None:
    a = torch.tensor([1.0, 5.0, 2.0, 9.0])
    assert spearman(a, a.exp()) == pytest.approx(1)
    assert spearman(a, -a) == pytest.approx(-1)
    assert spearman(a, torch.tensor([2.0, 1.0, 3.0, 4.0])) == pytest.approx(0.4)


@pytest.mark.parametrize("k_bar", [2, 3, 5, 8])
def test_random_counts_spend_the_budget(k_bar: int) -> None:
    ids = torch.tensor([[0, 3], [5, 3]])
    generator = torch.Generator().manual_seed(0)
    draws = [_random_counts(ids, k_bar, generator) for _ in range(20)]
    for counts in draws:
        assert int(counts[[0, 3, 5]].sum()) == 3 * k_bar
        assert 2 <= int(counts.min()) <= int(counts.max()) <= 8
    assert (len({tuple(c.tolist()) for c in draws}) > 1) == (k_bar not in (2, 8))


def test_exact_error_lets_experts_cancel() -> None:
    """Two experts with opposite errors: alone 1 each, together 0."""
    ids = torch.tensor([[0, 1]])
    inputs = LayerInputs(torch.zeros(1, 2), ids, torch.ones(1, 2), 2)
    errors = torch.zeros(1, 2, 9, 2)
    errors[0, 0, 2], errors[0, 1, 2] = 1.0, -1.0
    assert float(_exact(inputs, errors, torch.tensor([2, 2]))) == 0
    assert float(_exact(inputs, errors, torch.tensor([2, 8]))) == 1


def test_additive_cost_ranks_as_the_exact_one(
    encoded: Callable[..., Path], find_model: Callable[[str], Path], calibration_text: Path
) -> None:
    checkpoint, source = CheckpointReader(encoded(NAME)), SourceCheckpoint(find_model(NAME))
    options = CalibrationOptions(max_tokens=2048)
    inputs = Calibration(
        source, read_documents(str(calibration_text)), options, torch.device("cpu")
    )
    residuals = checkpoint.require_residuals("dpa")
    rows = check_diagonal(checkpoint, source, inputs, residuals)
    assert len(rows) == 4 * len(BUDGETS)
    assert min(row["spearman"] for row in rows) > 0.9
    # Against a table that says nothing, the check says so.
    shuffled = residuals.r.flip(1)
    rows = check_diagonal(checkpoint, source, inputs, type(residuals)(shuffled, residuals.counts))
    assert min(row["spearman"] for row in rows) < 0.9
