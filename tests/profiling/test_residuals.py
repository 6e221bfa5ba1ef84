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
from vllm_dpa.profiling.reference_model import ReferenceModel
from vllm_dpa.profiling.residuals import ProfileOptions, profile

NAME = "tiny-qwen2moe"
SMALL = ProfileOptions(max_tokens=64, window=32, tokens_per_expert=1000)


def test_residual_is_the_mean_squared_output_error_of_routed_tokens(
    encoded: Callable[..., Path],
    load_reference: Callable[[str], ReferenceModel],
    calibration_text: Path,
) -> None:
    reader, model = CheckpointReader(encoded(NAME)), load_reference(NAME)
    table, record = profile(reader, model, calibration_text, SMALL)
    assert record["calibration_tokens"] == 64
    layer, expert, k = reader.manifest.layers[2], int(table.counts[2].argmax()), 3
    seen = []
    module = model.experts_module(layer)
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    model.logits(model.windows(calibration_text, 32, 64))
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
    assert float(table.r[2, expert, k]) == pytest.approx(float((coarse - exact).square().mean()))


def test_residuals_fall_with_k_and_counts_add_up(encoded: Callable[..., Path]) -> None:
    table = CheckpointReader(encoded(NAME)).residuals()
    assert table is not None
    assert bool((table.r[..., 2:].diff(dim=-1) < 0).all())
    assert bool((table.r[..., :2] == 0).all())
    assert table.counts.sum(1).tolist() == [8192 * 4] * 4


def test_expert_without_tokens_falls_back_and_is_recorded(
    encoded: Callable[..., Path],
    load_reference: Callable[[str], ReferenceModel],
    tmp_path: Path,
) -> None:
    """Two tokens reach at most eight of the sixteen experts."""
    text = tmp_path / "text"
    text.write_text("The database server")
    reader = CheckpointReader(encoded(NAME))
    options = ProfileOptions(max_tokens=2, window=2)
    table, record = profile(reader, load_reference(NAME), text, options)
    for i, layer in enumerate(reader.manifest.layers):
        alone = torch.nonzero(table.counts[i] == 0)[:, 0].tolist()
        assert len(alone) >= 8
        assert record["fallback_experts"][layer.prefix] == alone
    assert bool(torch.isfinite(table.r).all())
    assert bool((table.r[..., 2:] > 0).all())


def test_text_shorter_than_a_window(
    encoded: Callable[..., Path], load_reference: Callable[[str], ReferenceModel], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("too short")
    with pytest.raises(DpaError, match="one window needs 256"):
        profile(CheckpointReader(encoded(NAME)), load_reference(NAME), text, ProfileOptions())


def test_reference_of_another_model(
    encoded: Callable[..., Path],
    load_reference: Callable[[str], ReferenceModel],
    calibration_text: Path,
) -> None:
    with pytest.raises(DpaError, match="is it the model that was encoded"):
        profile(
            CheckpointReader(encoded(NAME)), load_reference("tiny-olmoe"), calibration_text, SMALL
        )
