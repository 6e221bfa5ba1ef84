# SPDX-License-Identifier: Apache-2.0
"""Stage C: what it returns is never worse, it does lower errors, and it stays storable."""

import pytest
import torch
from torch import Tensor

from vllm_dpa.kernels.planes import GEOMETRIC, PER_CHUNK, SCALE_LAYOUTS
from vllm_dpa.profiling.codec import SharedScale
from vllm_dpa.profiling.fit import refine as module
from vllm_dpa.profiling.fit.matrix import MatrixCode
from vllm_dpa.profiling.fit.refine import refine
from vllm_dpa.profiling.layer_fit import EncodeOptions

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = torch.tensor([0, 0, 1, 2, 4, 8, 16, 32, 64.0]) / 127


def problem(layout: str) -> tuple[tuple[Tensor, Tensor], tuple[MatrixCode, MatrixCode], Tensor]:
    """Weights and stage A's codes of an expert of 72 x 40, and inputs of unlike columns."""
    generator = torch.Generator().manual_seed(7)
    w13 = torch.randn(80, 72, generator=generator) * 0.1
    w2 = torch.randn(72, 40, generator=generator) * 0.1
    x = torch.randn(300, 72, generator=generator) * torch.rand(72, generator=generator) * 3
    codec = SharedScale(EncodeOptions(scale_layout=layout, group_size=32), WEIGHTS)
    return (w13, w2), (codec.fit(w13[None], None), codec.fit(w2[None], None)), x


def errors(weights, codes, x: Tensor) -> Tensor:
    gate, up = torch.nn.functional.linear(x, weights[0]).chunk(2, dim=-1)
    output = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, weights[1])
    target = module._Target(x, torch.ones(len(x)), output)
    return module._errors(target, codes, torch.arange(len(x)))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_outputs_get_closer(layout: str) -> None:
    weights, codes, x = problem(layout)
    refined = refine(weights, codes, x, torch.ones(len(x)), WEIGHTS, layout, 0)
    before, after = errors(weights, codes, x), errors(weights, refined, x)
    assert after @ WEIGHTS < before @ WEIGHTS
    assert after[8] < 0.95 * before[8]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_codes_stay_and_scales_are_storable(layout: str) -> None:
    weights, codes, x = problem(layout)
    refined = refine(weights, codes, x, torch.ones(len(x)), WEIGHTS, layout, 0)
    for old, new in zip(codes, refined, strict=True):
        assert torch.equal(old.codes, new.codes)
        assert (new.scale >= 0).all()
        stored = new.scale if layout == PER_CHUNK else new.scale[..., :1]
        assert torch.equal(stored, stored.half().float())
        if layout == GEOMETRIC:
            assert torch.equal(new.scale, new.scale[..., :1] * 2.0 ** -torch.arange(8))


def test_a_change_for_the_worse_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATE", 3.0)
    weights, codes, x = problem(GEOMETRIC)
    refined = refine(weights, codes, x, torch.ones(len(x)), WEIGHTS, GEOMETRIC, 0)
    assert refined is codes


def test_same_seed_same_result() -> None:
    weights, codes, x = problem(GEOMETRIC)
    runs = [refine(weights, codes, x, torch.ones(len(x)), WEIGHTS, GEOMETRIC, 3) for _ in range(2)]
    assert torch.equal(runs[0][0].scale, runs[1][0].scale)
