# SPDX-License-Identifier: Apache-2.0
"""Residual profiling: against a direct computation, and experts that no token reaches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, silu

from vllm_dpa.checkpoint import CheckpointReader
from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.reference import decode
from vllm_dpa.profiling.calibration import Calibration, CalibrationOptions, read_documents
from vllm_dpa.profiling.reference_model import ReferenceModel
from vllm_dpa.profiling.residuals import ProfileOptions, _hull_record, profile
from vllm_dpa.profiling.source import SourceCheckpoint

NAME = "tiny-qwen2moe"
ALL = ProfileOptions(tokens_per_expert=1000)


def calibration(model: Path, text: Path, max_tokens: int, window: int = 32) -> Calibration:
    options = CalibrationOptions(max_tokens=max_tokens, window=window)
    return Calibration(
        SourceCheckpoint(model), read_documents(str(text)), options, torch.device("cpu")
    )


def test_residual_is_the_mean_squared_output_error_of_routed_tokens(
    encoded: Callable[..., Path],
    find_model: Callable[[str], Path],
    load_reference: Callable[[str], ReferenceModel],
    calibration_text: Path,
) -> None:
    reader, model = CheckpointReader(encoded(NAME)), load_reference(NAME)
    inputs = calibration(find_model(NAME), calibration_text, 64)
    table, record = profile(reader, SourceCheckpoint(find_model(NAME)), inputs, ALL)
    assert record["calibration"]["tokens"] == 64
    layer, expert, k = reader.manifest.layers[2], int(table.counts[2].argmax()), 3
    seen = []
    module = model.experts_module(layer)
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    model.logits(inputs._windows)
    hook.remove()
    hidden, ids = seen[0]
    x = hidden[(ids == expert).any(1)]
    assert len(x) == table.counts[2, expert]

    def output(w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x.double(), w13).chunk(2, -1)
        return linear(silu(gate) * up, w2)

    with torch.inference_mode():
        exact = output(
            module.gate_up_proj[expert].double(),  # type: ignore[operator]
            module.down_proj[expert].double(),  # type: ignore[operator]
        )
        coarse = output(*(decode(s, expert, k) for s in reader.read_layer(layer.prefix)))
    per_token = (coarse - exact).square().mean(1)
    assert float(table.r[2, expert, k]) == pytest.approx(float(per_token.mean()), rel=1e-4)
    assert table.stderr is not None
    spread = float(per_token.std()) / len(x) ** 0.5
    assert float(table.stderr[2, expert, k]) == pytest.approx(spread, rel=1e-3)


def test_residuals_fall_with_k_and_counts_add_up(encoded: Callable[..., Path]) -> None:
    table = CheckpointReader(encoded(NAME)).residuals()
    assert table is not None
    assert bool((table.r[..., 2:].diff(dim=-1) < 0).all())
    assert bool((table.r[..., :2] == 0).all())
    assert table.counts.sum(1).tolist() == [8192 * 4] * 4


def test_expert_without_tokens_falls_back_and_is_recorded(
    encoded: Callable[..., Path], find_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two tokens reach at most eight of the sixteen experts."""
    text = tmp_path / "text"
    text.write_text("The database server")
    reader, model = CheckpointReader(encoded(NAME)), find_model(NAME)
    inputs = calibration(model, text, 2, 2)
    table, record = profile(reader, SourceCheckpoint(model), inputs, ProfileOptions())
    for i, layer in enumerate(reader.manifest.layers):
        alone = torch.nonzero(table.counts[i] == 0)[:, 0].tolist()
        assert len(alone) >= 8
        assert record["fallback_experts"][layer.prefix] == alone
    assert bool(torch.isfinite(table.r).all())
    assert bool((table.r[..., 2:] > 0).all())
    assert bool(torch.isfinite(table.stderr).all())


def test_record_says_what_the_hull_changes() -> None:
    r = torch.zeros(1, 2, 9)
    r[0, 0, 2:] = torch.tensor([64.0, 16, 4, 1, 0.25, 0.06, 0.01])
    r[0, 1, 2:] = torch.tensor([64.0, 60, 4, 5, 0.25, 0.06, 0.01])
    record = _hull_record(r)
    assert record["rising_entries"] == 1
    assert record["hull_lowers_entries"] == 2
    assert record["hull_lowers_at_most"] == pytest.approx(1 - 2.125 / 5)


def test_reference_of_another_model(
    encoded: Callable[..., Path], find_model: Callable[[str], Path], calibration_text: Path
) -> None:
    other = find_model("tiny-olmoe")
    inputs = calibration(other, calibration_text, 64)
    with pytest.raises(DpaError, match="is it the model that was encoded"):
        profile(CheckpointReader(encoded(NAME)), SourceCheckpoint(other), inputs, ALL)
