# SPDX-License-Identifier: Apache-2.0
"""Stage A of the encoder: both half-steps are optimal, alternating them descends, the fit reaches
the documented quality, degenerate groups stay sound, and the gains make every tier unbiased."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_dpa.kernels import reference
from vllm_dpa.kernels.planes import (
    GEOMETRIC,
    NUM_CHUNKS,
    NUM_TIERS,
    PER_CHUNK,
    SCALE_LAYOUTS,
    PlaneStack,
    num_groups,
)
from vllm_dpa.profiling.fit.codes import NUM_CODES, best_codes, sign_table
from vllm_dpa.profiling.fit.matrix import MatrixCode, MatrixFit, assemble, cut_groups
from vllm_dpa.profiling.fit.scales import best_geometric_scale, best_scales
from vllm_dpa.profiling.fit.stage_a import HALVINGS, GroupFit, fit_groups, tier_weights

# SQNR in dB of tiers 2..6 on Gaussian groups of 128, w = E^-0.25: the table in the design's
# research on encoders, measured there with a prototype of its own.
pytestmark = pytest.mark.usefixtures("one_thread")

GAUSSIAN_SQNR = {
    PER_CHUNK: [8.63, 14.7, 20.6, 26.4, 31.8],
    GEOMETRIC: [8.59, 14.5, 20.4, 25.9, 30.6],
}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2510)


def tier_weights_of(exponent: float) -> Tensor:
    """Weights as of a Gaussian layer: every further bit quarters the error of a tier."""
    weights = 4.0 ** (exponent * torch.arange(NUM_TIERS))
    weights[:2] = 0
    return (weights / weights.sum()).float()


# --- the objective, in float64 and by definition ---


def tier_values(offset: Tensor, scale: Tensor) -> Tensor:
    """Decode of every code at tiers 1..8, float64 [n, 256, 8]."""
    return offset.double()[:, None, None] + (sign_table() * scale.double()[:, None]).cumsum(-1)


def cost_of_codes(weight: Tensor, offset: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
    """Cost of every weight under every code, float64 [n, G, 256]."""
    values = tier_values(offset, scale)
    cost = torch.zeros(*weight.shape, NUM_CODES, dtype=torch.float64)
    for j in range(NUM_CHUNKS):
        cost += weights[j + 1].double() * (weight.double()[..., None] - values[:, None, :, j]) ** 2
    return cost


def objective(
    weight: Tensor, mask: Tensor, codes: Tensor, offset: Tensor, scale: Tensor, weights: Tensor
) -> Tensor:
    """F of every group, float64 [n]."""
    value = offset.double()[:, None].expand(weight.shape)
    total = torch.zeros(len(weight), dtype=torch.float64)
    for j in range(NUM_CHUNKS):
        sign = sign_table()[codes.long(), j]
        value = value + scale.double()[:, j, None] * sign
        total += weights[j + 1].double() * (mask * (weight.double() - value) ** 2).sum(1)
    return total


def random_groups(
    generator: torch.Generator, groups: int, size: int = 128, columns: int = 128
) -> tuple[Tensor, Tensor]:
    """Gaussian groups and their mask; with fewer columns than the size, groups are short."""
    weight = torch.randn(groups, columns, generator=generator)
    return cut_groups(weight, size)


# --- code step ---


def excess_cost(weight: Tensor, offset: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
    """Cost of the chosen codes above the cheapest, float64 [n, G]."""
    cost = cost_of_codes(weight, offset, scale, weights)
    chosen = best_codes(weight, offset, scale, weights).long()
    return cost.gather(2, chosen[..., None])[..., 0] - cost.amin(-1)


SCALE_KINDS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "geometric": lambda g: torch.rand(24, 1, generator=g) * HALVINGS,
    "nearly geometric": lambda g: torch.rand(24, 8, generator=g).add(0.5) * HALVINGS,
    "random": lambda g: torch.rand(24, 8, generator=g),
    "random, either sign": lambda g: torch.randn(24, 8, generator=g),
    "rising": lambda g: torch.rand(24, 1, generator=g) * HALVINGS.flip(0),
    "some zero": lambda g: torch.rand(24, 8, generator=g) * (torch.rand(24, 8, generator=g) < 0.6),
    "all zero": lambda g: torch.zeros(24, 8),
    "trailing zeros": lambda g: torch.rand(24, 1, generator=g) * HALVINGS * (HALVINGS > 0.1),
    "one pair equal": lambda g: torch.rand(24, 8, generator=g)[:, [0, 1, 2, 3, 4, 5, 6, 6]],
    "two different": lambda g: torch.rand(24, 8, generator=g)[:, [0, 0, 0, 0, 1, 1, 1, 1]],
    "all equal": lambda g: torch.rand(24, 1, generator=g).expand(24, 8).contiguous(),
    "trailing noise": lambda g: torch.cat(
        (torch.full((24, 2), 0.3), 1e-8 * torch.rand(24, 6, generator=g)), dim=1
    ),
}


@pytest.mark.parametrize("exponent", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("make_scale", SCALE_KINDS.values(), ids=SCALE_KINDS.keys())
def test_best_codes_cost_as_little_as_the_cheapest_of_all_codes(
    make_scale: Callable[[torch.Generator], Tensor], exponent: float, generator: torch.Generator
) -> None:
    scale = make_scale(generator)
    offset = 0.1 * torch.randn(24, generator=generator)
    reach = 1.5 * scale.abs().sum(1, keepdim=True) + 0.1
    weight = offset[:, None] + reach * (2 * torch.rand(24, 32, generator=generator) - 1)
    excess = excess_cost(weight, offset, scale, tier_weights_of(exponent))
    # float32 decides between codes whose costs differ by less than its rounding.
    assert float((excess / reach**2).max()) < 1e-6


@pytest.mark.parametrize("most", [1, 2, 4])
def test_best_codes_are_exact_where_the_arithmetic_is(
    most: int, generator: torch.Generator
) -> None:
    # Small integers: every slope, intercept and product is exact in float32, most groups have
    # equal and zero scales, and many different codes have equal slopes.
    scale = torch.randint(0, most + 1, (200, 8), generator=generator).float()
    weight = torch.randint(-20, 21, (200, 16), generator=generator).float()
    weights = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1.0])
    excess = excess_cost(weight, torch.zeros(200), scale, weights)
    assert int((excess > 0).sum()) == 0


def test_best_codes_of_four_equal_scales() -> None:
    # The smallest case of many codes with one slope: the top half of them has nothing to choose.
    scale = torch.tensor([[0.0, 0, 0, 0, 1, 1, 1, 1]])
    weight = torch.arange(-6, 7.0)[None]
    weights = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1.0])
    assert float(excess_cost(weight, torch.zeros(1), scale, weights).max()) == 0


# --- scale step ---


def random_codes(generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.randint(0, NUM_CODES, like.shape, generator=generator, dtype=torch.uint8)


def fitted_codes(weight: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Codes as a round of the fit sees them."""
    return fit_groups(weight, mask, weights, PER_CHUNK).codes


CODE_KINDS: dict[str, Callable[[torch.Generator, Tensor, Tensor, Tensor], Tensor]] = {
    "random codes": lambda g, weight, mask, weights: random_codes(g, weight),
    "fitted codes": lambda g, weight, mask, weights: fitted_codes(weight, mask, weights),
}


@pytest.mark.parametrize("columns", [128, 100, 20], ids=lambda c: f"{c} columns")
@pytest.mark.parametrize("make_codes", CODE_KINDS.values(), ids=CODE_KINDS.keys())
def test_no_perturbation_of_the_best_scales_lowers_the_objective(
    make_codes: Callable[[torch.Generator, Tensor, Tensor, Tensor], Tensor],
    columns: int,
    generator: torch.Generator,
) -> None:
    weight, mask = random_groups(generator, 32, columns=columns)
    weights = tier_weights_of(0.5)
    codes = make_codes(generator, weight, mask, weights)
    offset, scale = best_scales(weight, mask, codes, weights)
    least = objective(weight, mask, codes, offset, scale, weights)
    for step in (1e-1, 1e-2, 1e-3, 1e-4):
        for _ in range(8):
            moved = objective(
                weight,
                mask,
                codes,
                offset + step * torch.randn(32, generator=generator),
                scale + step * torch.randn(32, 8, generator=generator),
                weights,
            )
            assert bool((moved >= least * (1 - 1e-6)).all())


@pytest.mark.parametrize("columns", [128, 100, 20], ids=lambda c: f"{c} columns")
@pytest.mark.parametrize("make_codes", CODE_KINDS.values(), ids=CODE_KINDS.keys())
def test_no_perturbation_of_the_best_geometric_scale_lowers_the_objective(
    make_codes: Callable[[torch.Generator, Tensor, Tensor, Tensor], Tensor],
    columns: int,
    generator: torch.Generator,
) -> None:
    weight, mask = random_groups(generator, 32, columns=columns)
    weights = tier_weights_of(0.5)
    codes = make_codes(generator, weight, mask, weights)
    offset, scale = best_geometric_scale(weight, mask, codes, weights)
    least = objective(weight, mask, codes, offset, scale[:, None] * HALVINGS, weights)
    for step in (1e-1, 1e-2, 1e-3, 1e-4):
        for _ in range(8):
            moved_scale = scale + step * torch.randn(32, generator=generator)
            moved = objective(
                weight,
                mask,
                codes,
                offset + step * torch.randn(32, generator=generator),
                moved_scale[:, None] * HALVINGS,
                weights,
            )
            assert bool((moved >= least * (1 - 1e-6)).all())


@pytest.mark.parametrize(
    "fit_scales", [best_scales, best_geometric_scale], ids=[PER_CHUNK, GEOMETRIC]
)
def test_padding_columns_do_not_influence_the_scales(
    fit_scales: Callable[..., tuple[Tensor, Tensor]], generator: torch.Generator
) -> None:
    weight, mask = random_groups(generator, 16, columns=100)
    codes, weights = random_codes(generator, weight), tier_weights_of(0.5)
    before = fit_scales(weight, mask, codes, weights)
    weight[:, 100:] = 1e6
    codes[:, 100:] = random_codes(generator, codes[:, 100:])
    after = fit_scales(weight, mask, codes, weights)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_padding_columns_do_not_influence_the_fit(layout: str, generator: torch.Generator) -> None:
    weight, mask = random_groups(generator, 16, columns=100)
    weights = tier_weights(weight, mask, 0.5)
    before = fit_groups(weight, mask, weights, layout)
    weight[:, 100:] = 1e6
    after = fit_groups(weight, mask, weights, layout)
    assert torch.equal(before.scale, after.scale)
    assert torch.equal(before.offset, after.offset)
    assert torch.equal(before.codes[:, :100], after.codes[:, :100])
    assert torch.equal(tier_weights(weight, mask, 0.5), weights)


# --- alternation ---


@pytest.mark.parametrize("columns", [128, 100, 9], ids=lambda c: f"{c} columns")
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_no_step_of_the_alternation_raises_the_objective(
    layout: str, columns: int, generator: torch.Generator
) -> None:
    weight, mask = random_groups(generator, 32, columns=columns)
    weights = tier_weights_of(0.25)
    offset = torch.zeros(32)
    scale = weight.abs().amax(1)[:, None] / 2 * HALVINGS
    last = torch.full((32,), torch.inf, dtype=torch.float64)
    # float32 decides between codes whose costs differ by less than its rounding.
    slack = 1e-6 * weight.double().square().amax(1)
    for _ in range(12):
        codes = best_codes(weight, offset, scale, weights)
        after_codes = objective(weight, mask, codes, offset, scale, weights)
        assert bool((after_codes <= last + slack).all())
        if layout == PER_CHUNK:
            offset, scale = best_scales(weight, mask, codes, weights)
        else:
            offset, one = best_geometric_scale(weight, mask, codes, weights)
            scale = one[:, None] * HALVINGS
        last = objective(weight, mask, codes, offset, scale, weights)
        assert bool((last <= after_codes + slack).all())


# --- the whole fit ---


@pytest.mark.parametrize("columns", [128, 100, 9], ids=lambda c: f"{c} columns")
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_fitted_codes_are_the_best_for_the_scales_as_stored(
    layout: str, columns: int, generator: torch.Generator
) -> None:
    weight, mask = random_groups(generator, 32, columns=columns)
    weights = tier_weights(weight, mask, 0.5)
    fit = fit_groups(weight, mask, weights, layout)
    assert fit.scale.dtype == fit.offset.dtype == torch.float16
    cost = cost_of_codes(weight, fit.offset.float(), fit.plane_scales(), weights)
    excess = cost.gather(2, fit.codes.long()[..., None])[..., 0] - cost.amin(-1)
    assert float((mask * excess).max()) < 1e-6 * float(weight.abs().max()) ** 2


def sqnr_db(weight: Tensor, mask: Tensor, fit: GroupFit) -> list[float]:
    """Signal over error power of tiers 0..8, in dB."""
    power = (mask * weight.double() ** 2).sum()
    errors = [(mask * (weight.double() - tier) ** 2).sum() for tier in fit.tiers()]
    return [10 * float(torch.log10(power / error)) for error in errors]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_quality_on_gaussian_groups_is_as_documented(
    layout: str, generator: torch.Generator
) -> None:
    weight, mask = random_groups(generator, 2048)
    fit = fit_groups(weight, mask, tier_weights(weight, mask, 0.25), layout)
    found = sqnr_db(weight, mask, fit)
    assert found[2:7] == pytest.approx(GAUSSIAN_SQNR[layout], abs=0.3)
    assert found[1:] == sorted(found[1:])


@pytest.mark.parametrize("exponent", [0.0, 0.25, 0.5, 1.0])
def test_larger_tier_exponent_favours_the_high_tiers(
    exponent: float, generator: torch.Generator
) -> None:
    weight, mask = random_groups(generator, 256)
    weights = tier_weights(weight, mask, exponent)
    assert weights[:2].tolist() == [0, 0]
    assert float(weights.sum()) == pytest.approx(1, abs=1e-6)
    if exponent == 0:
        torch.testing.assert_close(weights[2:], torch.full((7,), 1 / 7))
    else:
        assert weights[2:].tolist() == sorted(weights[2:].tolist())
        assert float(weights[2]) < float(weights[8])


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_fit_does_not_depend_on_how_many_groups_are_fitted_at_once(
    layout: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, mask = random_groups(generator, 50)
    weights = tier_weights(weight, mask, 0.5)
    at_once = fit_groups(weight, mask, weights, layout)
    monkeypatch.setattr("vllm_dpa.profiling.fit.stage_a.BLOCK", 20)  # the last block is short
    in_blocks = fit_groups(weight, mask, weights, layout)
    torch.testing.assert_close(in_blocks.scale, at_once.scale)
    torch.testing.assert_close(in_blocks.offset, at_once.offset)
    assert (in_blocks.codes == at_once.codes).float().mean() > 0.99


# --- degenerate groups ---


def fit_rows(rows: Tensor, layout: str, group_size: int = 128) -> tuple[GroupFit, Tensor, Tensor]:
    """(fit, groups, mask) as the encoder makes them; checks what every fit must be."""
    weight, mask = cut_groups(rows, group_size)
    weights = tier_weights(weight, mask, 0.5)
    assert bool(torch.isfinite(weights).all())
    fit = fit_groups(weight, mask, weights, layout)
    assert bool(torch.isfinite(fit.scale).all())
    assert bool(torch.isfinite(fit.offset).all())
    assert bool((fit.scale >= 0).all())
    return fit, weight, mask


def top_tier_error(rows: Tensor, layout: str) -> float:
    """Relative RMS error at tier 8."""
    fit, weight, mask = fit_rows(rows, layout)
    error = mask * (weight - fit.tiers()[8])
    return float(error.norm() / (mask * weight).norm())


@pytest.mark.parametrize("columns", [128, 100, 1], ids=lambda c: f"{c} columns")
@pytest.mark.parametrize("value", [1e-6, 1e-3, 0.3, -0.7, 1.0, 1e3, -1e3])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_constant_group_is_decoded_to_fp16_precision(
    layout: str, value: float, columns: int
) -> None:
    fit, weight, mask = fit_rows(torch.full((4, columns), value), layout)
    error = (mask * (weight - fit.tiers()[8])).abs().max()
    # Half a unit in the last place of each of the scales and the offset that add up to the value;
    # below fp16's normal numbers, its smallest step.
    assert float(error) <= max(2.0**-10 * abs(value), 2.0**-23)


@pytest.mark.parametrize("columns", [128, 100, 1], ids=lambda c: f"{c} columns")
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_group_of_zeros_decodes_to_zeros_at_every_tier(layout: str, columns: int) -> None:
    fit, _, _ = fit_rows(torch.zeros(4, columns), layout)
    for tier in fit.tiers():
        assert torch.equal(tier, torch.zeros_like(tier))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_zero_and_constant_groups_do_not_disturb_their_neighbours(
    layout: str, generator: torch.Generator
) -> None:
    weight, mask = random_groups(generator, 8)
    weights = tier_weights_of(0.5)
    alone = fit_groups(weight, mask, weights, layout)
    weight[2], weight[5] = 0.0, 0.25
    among = fit_groups(weight, mask, weights, layout)
    others = [0, 1, 3, 4, 6, 7]
    torch.testing.assert_close(among.scale[others], alone.scale[others])
    assert (among.codes[others] == alone.codes[others]).float().mean() > 0.99


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 7])
def test_group_of_fewer_columns_than_planes_is_decoded_well(
    columns: int, layout: str, generator: torch.Generator
) -> None:
    # 8 planes hold 256 levels: the error is that of a round to nearest, 1/500 of the range.
    assert top_tier_error(torch.randn(64, columns, generator=generator), layout) < 5e-3


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("columns", [129, 257], ids=lambda c: f"{c} columns")
def test_last_group_of_a_single_column_is_decoded_well(
    columns: int, layout: str, generator: torch.Generator
) -> None:
    assert top_tier_error(torch.randn(64, columns, generator=generator), layout) < 1e-2


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1.0, 1e3])
def test_fit_is_sound_at_every_magnitude(
    magnitude: float, layout: str, generator: torch.Generator
) -> None:
    error = top_tier_error(magnitude * torch.randn(64, 128, generator=generator), layout)
    # Scales of weights of 1e-6 are fp16 denormals (steps of 6e-8): there, any sane size is all
    # that can be asked.
    assert error < (0.1 if magnitude < 1e-5 else 1e-2)


LEVEL_KINDS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "two levels": lambda g: 0.1 * torch.randint(0, 2, (64, 128), generator=g),
    "three levels": lambda g: torch.randint(-1, 2, (64, 128), generator=g).float(),
    "16 levels": lambda g: 0.01 * torch.randint(-8, 8, (64, 128), generator=g),
    "mostly zeros": lambda g: (
        torch.randn(64, 128, generator=g) * (torch.rand(64, 128, generator=g) < 0.05)
    ),
    "one outlier": lambda g: torch.cat((torch.full((64, 127), 0.01), torch.ones(64, 1)), dim=1),
}


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("make_rows", LEVEL_KINDS.values(), ids=LEVEL_KINDS.keys())
def test_group_of_few_distinct_values_is_decoded_well(
    make_rows: Callable[[torch.Generator], Tensor], layout: str, generator: torch.Generator
) -> None:
    # Pruned or already quantised weights. Their best planes are collinear, and the scales equal.
    # Geometric scales cannot be equal: they spend their 256 levels evenly over the range.
    assert top_tier_error(make_rows(generator), layout) < {PER_CHUNK: 2e-2, GEOMETRIC: 4e-2}[layout]


# --- matrices ---


@pytest.mark.parametrize(
    ("columns", "group_size"), [(128, 128), (100, 32), (129, 128), (1, 64), (36, 64)]
)
def test_cut_groups_pads_with_zeros_and_masks_the_padding(
    columns: int, group_size: int, generator: torch.Generator
) -> None:
    weight = torch.randn(2, 3, columns, generator=generator).bfloat16()
    groups, mask = cut_groups(weight, group_size)
    count = num_groups(columns, group_size)
    assert groups.shape == mask.shape == (6 * count, group_size)
    assert groups.dtype == torch.float32
    rows = groups.reshape(2, 3, -1)
    assert torch.equal(rows[..., :columns], weight.float())
    assert not bool(rows[..., columns:].any())
    expected = torch.zeros(6, count * group_size)
    expected[:, :columns] = 1
    assert torch.equal(mask.reshape(6, -1), expected)


def fit_matrix(weight: Tensor, layout: str, group_size: int, row_blocks: int) -> MatrixFit:
    """Encode [E, N, C] as the encoder does."""
    groups, mask = cut_groups(weight, group_size)
    fit = fit_groups(groups, mask, tier_weights(groups, mask, 0.5), layout)
    code = MatrixCode.of_groups(fit, weight.shape, group_size)
    return assemble(weight, code, layout, row_blocks)


def stack_of(matrix: MatrixFit, columns: int, group_size: int, layout: str) -> PlaneStack:
    return PlaneStack(
        planes=matrix.planes,
        scales=matrix.scales,
        offset=matrix.offset,
        gain=matrix.gain,
        columns=columns,
        group_size=group_size,
        scale_layout=layout,
    )


@pytest.mark.parametrize("row_blocks", [1, 2], ids=["w2", "w13"])
@pytest.mark.parametrize(("columns", "group_size"), [(128, 128), (100, 32), (129, 128), (36, 64)])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_gain_makes_every_tier_unbiased(
    layout: str, columns: int, group_size: int, row_blocks: int, generator: torch.Generator
) -> None:
    weight = torch.randn(3, 16, columns, generator=generator)
    # Blocks of unlike distribution, so that a gain shared by both would be wrong for both.
    weight[:, 8:] = 0.1 * weight[:, 8:] ** 3
    matrix = fit_matrix(weight, layout, group_size, row_blocks)
    stack = stack_of(matrix, columns, group_size, layout)
    for expert in range(3):
        target = weight[expert].double().chunk(row_blocks)
        for k in range(1, NUM_TIERS):
            decoded = reference.decode(stack, expert, k).chunk(row_blocks)
            for w, c in zip(target, decoded, strict=True):
                assert float((w * c).sum() / (w * w).sum()) == pytest.approx(1, abs=1e-5)


def test_gate_and_up_rows_get_gains_of_their_own(generator: torch.Generator) -> None:
    gate = torch.randn(2, 8, 128, generator=generator)
    up = torch.randn(2, 8, 128, generator=generator) ** 3
    both = fit_matrix(torch.cat((gate, up), dim=1), PER_CHUNK, 128, row_blocks=2)
    assert both.gain.shape == (2, 2, NUM_TIERS)
    assert bool(((both.gain[:, 0, 2] - both.gain[:, 1, 2]).abs() > 1e-3).all())


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_matrix_errors_are_those_of_the_decoded_weights(
    layout: str, generator: torch.Generator
) -> None:
    weight = torch.randn(2, 16, 100, generator=generator)
    matrix = fit_matrix(weight, layout, 32, row_blocks=2)
    stack = stack_of(matrix, 100, 32, layout)
    blocks = matrix.gain.double().repeat_interleave(8, dim=1)
    torch.testing.assert_close(matrix.power, weight.double().square().sum((1, 2)))
    for expert in range(2):
        for k in range(1, NUM_TIERS):
            decoded = reference.decode(stack, expert, k)
            plain = decoded / blocks[expert, :, k, None]
            for found, values in ((matrix.error_with_gain, decoded), (matrix.error, plain)):
                expected = float((weight[expert].double() - values).square().sum())
                assert float(found[expert, k]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_expert_of_zeros_gets_gain_one_and_decodes_to_zeros(layout: str) -> None:
    matrix = fit_matrix(torch.zeros(1, 4, 100), layout, 32, row_blocks=2)
    assert torch.equal(matrix.gain, torch.ones(1, 2, NUM_TIERS))
    stack = stack_of(matrix, 100, 32, layout)
    for k in range(1, NUM_TIERS):
        assert not bool(reference.decode(stack, 0, k).any())
