# SPDX-License-Identifier: Apache-2.0
"""Stage B of the encoder: the code step is exact, no step raises the objective, the field of errors
stays true, and outputs are closer than stage A's."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from vllm_dpa.kernels.planes import GEOMETRIC, MIN_CHUNKS, NUM_TIERS, PER_CHUNK, SCALE_LAYOUTS
from vllm_dpa.profiling.codec import SharedScale
from vllm_dpa.profiling.fit.code_step import descend, descend_plain
from vllm_dpa.profiling.fit.codes import sign_table
from vllm_dpa.profiling.fit.matrix import MatrixCode, assemble
from vllm_dpa.profiling.fit.stage_b import Descent
from vllm_dpa.profiling.fitters import damped_hessian
from vllm_dpa.profiling.layer_fit import EncodeOptions

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = torch.tensor([0, 0, 1, 2, 4, 8, 16, 32, 64.0]) / 127


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2512)


def correlated(generator: torch.Generator, tokens: int, columns: int) -> Tensor:
    """Inputs with a strong common part and columns of very different size."""
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator) @ (mix + torch.eye(columns))
    x += 2 * torch.randn(tokens, 1, generator=generator)
    return x * torch.rand(columns, generator=generator).add(0.05)


def problem(
    generator: torch.Generator, layout: str, group_size: int, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor, MatrixCode]:
    """Weight [E, N, C], Hessian [E, C, C] and stage A's code of it."""
    experts, _, columns = shape
    weight = torch.randn(*shape, generator=generator) * 0.05
    inputs = [correlated(generator, 3 * columns, columns) for _ in range(experts)]
    hessian = torch.stack([damped_hessian(x, torch.ones(len(x))) for x in inputs])
    options = EncodeOptions(scale_layout=layout, group_size=group_size)
    return weight, hessian, SharedScale(options, WEIGHTS).fit(weight, None)


def errors_of(weight: Tensor, code: MatrixCode) -> Tensor:
    """float32 [E, N, 7, C]: decode minus weight at tiers 2..8."""
    return torch.stack([t - weight for t in code.tiers()][MIN_CHUNKS - 1 :], dim=2)


def code_step_arguments(generator: torch.Generator, columns: int) -> tuple[Tensor, ...]:
    """Arguments of the code step on one block, from a random code."""
    experts, rows = 2, 5
    weight = torch.randn(experts, rows, columns, generator=generator)
    inputs = torch.randn(experts, 3 * columns, columns, generator=generator)
    hessian = (inputs.transpose(1, 2) @ inputs / inputs.shape[1]).contiguous()
    scale = torch.rand(experts, rows, 8, generator=generator) * 2.0 ** -torch.arange(8)
    offset = torch.randn(experts, rows, generator=generator) * 0.1
    codes = torch.randint(0, 256, weight.shape, generator=generator, dtype=torch.uint8)
    decoded = (sign_table()[codes.long()] * scale[:, :, None]).cumsum(-1)[..., MIN_CHUNKS - 1 :]
    error = decoded + (offset[..., None] - weight)[..., None]
    error = error.transpose(-1, -2).contiguous()
    outside = torch.randn(error.shape, generator=generator)
    gradient = error @ hessian[:, None] + outside
    return weight, hessian, scale, offset, WEIGHTS, codes, error, gradient


@pytest.mark.parametrize("columns", [1, 7, 32, 128])
def test_native_code_step_does_what_the_plain_one_does(
    columns: int, generator: torch.Generator
) -> None:
    arguments = code_step_arguments(generator, columns)
    native, plain = (tuple(a.clone() for a in arguments) for _ in range(2))
    descend(*native)
    descend_plain(*plain)
    # A tie within rounding may go either way, and then moves the row's later columns.
    same_rows = (native[5] == plain[5]).all(-1)
    assert same_rows.float().mean() >= 0.9
    torch.testing.assert_close(native[6][same_rows], plain[6][same_rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [descend, descend_plain])
def test_first_column_takes_the_cheapest_of_all_codes(step, generator: torch.Generator) -> None:
    weight, hessian, scale, offset, weights, codes, error, gradient = code_step_arguments(
        generator, 16
    )
    others = (gradient[..., 0] - error[..., 0] * hessian[:, None, 0, 0, None]).double()
    steps = (sign_table().double() * scale[:, :, None].double()).cumsum(-1)
    distance = steps[..., MIN_CHUNKS - 1 :] + (offset - weight[..., 0]).double()[..., None, None]
    curvature = hessian[:, 0, 0].double()[:, None, None, None]
    cost = (curvature * distance**2 + 2 * distance * others[:, :, None]) @ weights[2:].double()
    step(weight, hessian, scale, offset, weights, codes, error, gradient)
    taken = cost.gather(2, codes[..., 0, None].long())[..., 0]
    assert (taken - cost.amin(2) <= 1e-5 * cost.abs().amax(2)).all()


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize(
    ("group_size", "shape"),
    [(128, (2, 12, 256)), (64, (1, 6, 100)), (32, (1, 5, 33)), (128, (1, 3, 1))],
)
def test_no_sweep_raises_the_objective(
    layout: str, group_size: int, shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    weight, hessian, code = problem(generator, layout, group_size, shape)
    descent = Descent(weight, hessian, code, WEIGHTS, layout)
    values = [descent.objective()]
    for sweep in range(5):
        descent.sweep(refit=sweep > 0)
        values.append(descent.objective())
    for before, after in pairwise(values):
        assert (after <= before * (1 + 1e-5)).all()
    if shape[2] > 1:
        assert (values[-1] < 0.8 * values[0]).all()
    torch.testing.assert_close(descent.error, errors_of(weight, code), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_codes_stay_storable(layout: str, generator: torch.Generator) -> None:
    weight, hessian, code = problem(generator, layout, 64, (2, 8, 192))
    descent = Descent(weight, hessian, code, WEIGHTS, layout)
    for _ in range(3):
        descent.sweep(refit=True)
    assert (code.scale >= 0).all()
    stored = code.scale if layout == PER_CHUNK else code.scale[..., :1]
    assert torch.equal(stored, stored.half().float())
    assert torch.equal(code.offset, code.offset.half().float())
    if layout == GEOMETRIC:
        assert torch.equal(code.scale, code.scale[..., :1] * 2.0 ** -torch.arange(8))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_outputs_of_tiers_2_to_6_are_closer_than_those_of_stage_a(
    layout: str, generator: torch.Generator
) -> None:
    weight, hessian, code = problem(generator, layout, 128, (2, 64, 256))

    def output_errors() -> Tensor:
        tiers = [t - weight for t in code.tiers()][MIN_CHUNKS - 1 :]
        return torch.stack([((d @ hessian) * d).sum((1, 2)) for d in tiers], dim=1)

    before = output_errors()
    descent = Descent(weight, hessian, code, WEIGHTS, layout)
    for sweep in range(6):
        descent.sweep(refit=sweep > 0)
    # The objective trades the highest tiers, whose error is smallest, for the others.
    assert (output_errors() < 0.85 * before)[:, :5].all()


def test_scales_are_the_best_for_their_codes(generator: torch.Generator) -> None:
    """Against a least-squares solution of all groups at once, in float64."""
    weight, hessian, code = problem(generator, PER_CHUNK, 128, (1, 4, 128))
    descent = Descent(weight, hessian, code, WEIGHTS, PER_CHUNK)
    root = torch.linalg.cholesky(hessian[0].double()).T
    descent._refit.step(code, 0, descent.error @ hessian[:, None], hessian)
    refitted = Descent(weight, hessian, code, WEIGHTS, PER_CHUNK).objective()
    best = torch.zeros(1, dtype=torch.float64)
    for row in range(4):
        signs = sign_table()[code.codes[0, row].long()].double()
        blocks, targets = [], []
        for k in range(MIN_CHUNKS, NUM_TIERS):
            basis = torch.cat((torch.ones(128, 1), signs * (torch.arange(8) < k)), dim=1)
            weight_of_tier = WEIGHTS[k].double().sqrt()
            blocks.append(weight_of_tier * root @ basis)
            targets.append(weight_of_tier * root @ weight[0, row].double())
        a, b = torch.cat(blocks), torch.cat(targets)
        solution = torch.linalg.lstsq(a, b[:, None]).solution
        best += (a @ solution - b[:, None]).square().sum()
    assert refitted <= best * 1.01  # fp16 rounding of the scales


def test_gains_make_every_tier_unbiased_in_output_space(generator: torch.Generator) -> None:
    weight, hessian, code = problem(generator, PER_CHUNK, 64, (2, 16, 128))
    fit = assemble(weight, code, PER_CHUNK, 2, hessian)
    for k, tier in enumerate(code.tiers(), start=1):
        if k < MIN_CHUNKS:
            continue
        scaled = tier.unflatten(1, (2, -1)) * fit.gain[:, :, k, None, None]
        probe = (weight @ hessian).unflatten(1, (2, -1))
        along = (probe * scaled).sum((2, 3))
        itself = (probe * weight.unflatten(1, (2, -1))).sum((2, 3))
        torch.testing.assert_close(along, itself, rtol=1e-4, atol=0)


def test_hessian_of_inputs_that_are_all_zero_is_usable() -> None:
    hessian = damped_hessian(torch.zeros(5, 8), torch.ones(5))
    assert torch.equal(hessian, torch.eye(8))


def test_hessian_weighs_inputs(generator: torch.Generator) -> None:
    x = torch.randn(6, 4, generator=generator)
    weights = torch.tensor([1.0, 0, 2, 0, 0, 1])
    expected = (x.T * weights) @ x / 4
    expected += 0.01 * expected.diagonal().mean() * torch.eye(4)
    torch.testing.assert_close(damped_hessian(x, weights), expected)
