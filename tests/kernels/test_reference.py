# SPDX-License-Identifier: Apache-2.0
"""The reference kernels: decode against a scalar loop, fused MoE and the knapsack against plain
enumeration, tie rule included."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_dpa.kernels import reference
from vllm_dpa.kernels.planes import GEOMETRIC, SCALE_LAYOUTS, PlaneStack

StackFactory = Callable[..., PlaneStack]


def scalar_decode(stack: PlaneStack, expert: int, k: int) -> Tensor:
    """The decode rule of the design, weight by weight in Python floats, float64 [N, C]."""
    planes = [plane[expert].tolist() for plane in stack.planes]
    scales = [scale[expert].tolist() for scale in stack.scales]
    if stack.scale_layout == GEOMETRIC:
        scales = [[[s / 2**j for s in row] for row in scales[0]] for j in range(len(planes))]
    offset = stack.offset[expert].tolist()
    gain = stack.gain[expert].tolist()
    rows_per_block = stack.rows // len(gain)
    rows = []
    for n in range(stack.rows):
        row = []
        for c in range(stack.columns):
            g = c // stack.group_size
            value = offset[n][g]
            for j in range(k):
                is_one = (planes[j][n][c // 8] >> (c % 8)) & 1
                value += scales[j][n][g] if is_one else -scales[j][n][g]
            row.append(gain[n // rows_per_block][k] * value)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def first_chunks(stack: PlaneStack, k: int) -> PlaneStack:
    """What a device holds that loads only the first k chunk files."""
    kept = stack.scales if stack.scale_layout == GEOMETRIC else stack.scales[:k]
    return dataclasses.replace(stack, planes=stack.planes[:k], scales=kept)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
# A single column, a last group of one column, groups that end inside a byte, whole groups only.
@pytest.mark.parametrize("columns", [1, 129, 100, 128])
def test_decode_is_the_rule_of_the_design(
    layout: str, group_size: int, columns: int, make_stack: StackFactory
) -> None:
    stack = make_stack(2, 4, columns, group_size, layout, row_blocks=2)
    for expert, k in itertools.product(range(2), range(1, 9)):
        torch.testing.assert_close(
            reference.decode(stack, expert, k),
            scalar_decode(stack, expert, k),
            rtol=1e-12,
            atol=1e-15,
        )


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_decode_in_float32_has_float32_precision(layout: str, make_stack: StackFactory) -> None:
    stack = make_stack(scale_layout=layout)
    low, high = (reference.decode(stack, 1, 8, d) for d in (torch.float32, torch.float64))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("k", range(1, 9))
def test_tier_k_needs_only_the_first_k_chunks(
    layout: str, k: int, make_stack: StackFactory
) -> None:
    stack = make_stack(columns=100, scale_layout=layout, row_blocks=2)
    cut = first_chunks(stack, k)
    assert torch.equal(reference.decode(cut, 2, k), reference.decode(stack, 2, k))


def test_every_row_block_has_its_own_gain(make_stack: StackFactory) -> None:
    stack = make_stack(rows=8, row_blocks=2)
    plain = dataclasses.replace(stack, gain=torch.ones_like(stack.gain))
    for k in range(1, 9):
        scaled, unscaled = reference.decode(stack, 0, k), reference.decode(plain, 0, k)
        gate, up = stack.gain[0, :, k].double()
        torch.testing.assert_close(scaled[:4], gate * unscaled[:4], rtol=1e-12, atol=0)
        torch.testing.assert_close(scaled[4:], up * unscaled[4:], rtol=1e-12, atol=0)


def test_decode_never_uses_padding_bits(make_stack: StackFactory) -> None:
    stack = make_stack(columns=100)
    dirty = dataclasses.replace(stack, planes=[plane.clone() for plane in stack.planes])
    for plane in dirty.planes:
        plane[..., -1] |= 0xF0  # 100 columns use 4 bits of their last byte
    assert torch.equal(reference.decode(dirty, 0, 8), reference.decode(stack, 0, 8))


@pytest.mark.parametrize("k", [0, 4, 9])
def test_decode_refuses_a_tier_that_is_not_resident(k: int, make_stack: StackFactory) -> None:
    with pytest.raises(ValueError, match=f"k = {k}"):
        reference.decode(make_stack(chunks=3), 0, k)


@pytest.mark.parametrize("per_pair", [False, True], ids=["k per expert", "k per pair"])
def test_fused_moe_is_the_sum_over_the_pairs_of_a_gated_mlp(
    per_pair: bool, make_stack: StackFactory, generator: torch.Generator
) -> None:
    hidden, intermediate = 20, 6
    w13 = make_stack(rows=2 * intermediate, columns=hidden, row_blocks=2)
    w2 = make_stack(rows=hidden, columns=intermediate)
    x = torch.randn(2, hidden, generator=generator)
    ids = torch.tensor([[2, 0], [1, -1]])
    gates = torch.rand(2, 2, generator=generator)
    counts = torch.tensor([[3, 8], [2, 0]]) if per_pair else torch.tensor([8, 2, 3])

    def mlp(t: int, expert: int, k: int) -> Tensor:
        both = scalar_decode(w13, expert, k) @ x[t].double()
        gate, up = both[:intermediate], both[intermediate:]
        return scalar_decode(w2, expert, k) @ (gate * torch.sigmoid(gate) * up)

    g = gates.double()
    expected = torch.stack(
        [g[0, 0] * mlp(0, 2, 3) + g[0, 1] * mlp(0, 0, 8), g[1, 0] * mlp(1, 1, 2)]
    )
    out = reference.fused_moe(x, w13, w2, gates, ids, counts)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-15)


# --- knapsack ---


def total_cost(
    cost: list[list[float]], active: list[bool], counts: Sequence[int], min_chunks: int
) -> float:
    items = zip(cost, active, counts, strict=True)
    return sum(choices[k - min_chunks] for choices, is_active, k in items if is_active)


def enumerate_knapsack(
    cost: list[list[float]], active: list[bool], budget: int, min_chunks: int
) -> list[int]:
    """Best allocation of one row by trying all; of equal ones the lexicographically largest."""
    allowed = [
        range(min_chunks + len(choices) - 1, min_chunks - 1, -1) if is_active else [0]
        for choices, is_active in zip(cost, active, strict=True)
    ]
    # product() runs through them from the lexicographically largest down, and min() keeps the
    # first of equals.
    feasible = [counts for counts in itertools.product(*allowed) if sum(counts) == budget]
    return list(min(feasible, key=lambda counts: total_cost(cost, active, counts, min_chunks)))


@dataclasses.dataclass
class Problem:
    """A batch of knapsacks as lists; see ``reference.knapsack``."""

    cost: list[list[list[float]]]
    active: list[list[bool]]
    budget: list[int]
    min_chunks: int

    def solve(self, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
        cost = torch.tensor(self.cost[rows], dtype=dtype)
        if cost.dim() < 3:  # no items: the list does not tell the number of choices
            cost = cost.reshape(len(self.cost[rows]), 0, 3)
        active = torch.tensor(self.active[rows], dtype=torch.bool).reshape(cost.shape[:2])
        budget = torch.tensor(self.budget[rows], dtype=torch.int64)
        return reference.knapsack(cost, active, budget, self.min_chunks)


@st.composite
def problems(draw: st.DrawFn, costs: st.SearchStrategy[float]) -> Problem:
    """Feasible knapsacks that are small enough to enumerate (at most 4^5 allocations)."""
    rows, items = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    choices, min_chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def table(of: st.SearchStrategy[float]) -> list[list[float]]:
        return [draw(st.lists(of, min_size=choices, max_size=choices)) for _ in range(items)]

    active = [draw(st.lists(st.booleans(), min_size=items, max_size=items)) for _ in range(rows)]
    budget = [
        draw(st.integers(sum(row) * min_chunks, sum(row) * (min_chunks + choices - 1)))
        for row in active
    ]
    return Problem([table(costs) for _ in range(rows)], active, budget, min_chunks)


# Few different integers: exact in float32, and nearly every problem has ties.
tied_costs = st.integers(0, 2).map(float)
real_costs = st.floats(0, 100, width=32)


@settings(max_examples=300, deadline=None)
@given(problems(tied_costs))
def test_knapsack_finds_the_lexicographically_largest_of_the_optima(problem: Problem) -> None:
    expected = [
        enumerate_knapsack(cost, active, budget, problem.min_chunks)
        for cost, active, budget in zip(problem.cost, problem.active, problem.budget, strict=True)
    ]
    assert problem.solve().tolist() == expected


@settings(max_examples=200, deadline=None)
@given(problems(real_costs))
def test_knapsack_costs_no_more_than_the_enumerated_optimum(problem: Problem) -> None:
    found = problem.solve(dtype=torch.float64).tolist()
    for row, counts in enumerate(found):
        cost, active, budget = problem.cost[row], problem.active[row], problem.budget[row]
        best = enumerate_knapsack(cost, active, budget, problem.min_chunks)
        least = total_cost(cost, active, best, problem.min_chunks)
        assert sum(counts) == budget
        # Sums of the same numbers in another order.
        assert total_cost(cost, active, counts, problem.min_chunks) <= least * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(problems(real_costs | tied_costs))
def test_knapsack_of_a_row_does_not_depend_on_the_other_rows(problem: Problem) -> None:
    together = problem.solve()
    for row in range(len(problem.budget)):
        assert torch.equal(together[row : row + 1], problem.solve(slice(row, row + 1)))


def random_cost(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator)


@pytest.mark.parametrize("items", [1, 2, 7])
@pytest.mark.parametrize("end", ["min", "max"])
def test_knapsack_at_the_ends_of_the_budget_has_one_answer(
    items: int, end: str, generator: torch.Generator
) -> None:
    k = 2 if end == "min" else 8
    counts = reference.knapsack(
        random_cost(generator, 3, items, 7),
        torch.ones(3, items, dtype=torch.bool),
        torch.full((3,), items * k),
        min_chunks=2,
    )
    assert torch.equal(counts, torch.full((3, items), k))


@pytest.mark.parametrize("budget", range(2, 9))
def test_knapsack_of_one_item_gives_it_the_whole_budget(
    budget: int, generator: torch.Generator
) -> None:
    counts = reference.knapsack(
        random_cost(generator, 1, 1, 7), torch.ones(1, 1).bool(), torch.tensor([budget]), 2
    )
    assert counts.tolist() == [[budget]]


@pytest.mark.parametrize(("rows", "items"), [(1, 0), (3, 0), (0, 4), (0, 0)])
def test_knapsack_without_items_or_rows_is_empty(rows: int, items: int) -> None:
    counts = reference.knapsack(
        torch.zeros(rows, items, 7),
        torch.zeros(rows, items, dtype=torch.bool),
        torch.zeros(rows, dtype=torch.int64),
        2,
    )
    assert counts.shape == (rows, items)
    assert counts.dtype == torch.int64


def test_knapsack_ignores_whatever_an_inactive_item_costs(generator: torch.Generator) -> None:
    cost = random_cost(generator, 1, 5, 7)
    active = torch.tensor([[True, False, True, False, True]])
    budget = torch.tensor([13])
    without = reference.knapsack(cost[:, ::2], active[:, ::2], budget, 2)
    for poison in (torch.nan, torch.inf, -torch.inf, -1e30):
        cost[:, 1::2] = poison
        counts = reference.knapsack(cost, active, budget, 2)
        assert torch.equal(counts[:, ::2], without)
        assert counts[:, 1::2].tolist() == [[0, 0]]


def test_knapsack_with_all_items_inactive_gives_nothing(generator: torch.Generator) -> None:
    counts = reference.knapsack(
        random_cost(generator, 1, 4, 7), torch.zeros(1, 4).bool(), torch.tensor([0]), 2
    )
    assert counts.tolist() == [[0, 0, 0, 0]]


def test_knapsack_with_one_choice_needs_no_budget_to_spare(generator: torch.Generator) -> None:
    counts = reference.knapsack(
        random_cost(generator, 1, 3, 1), torch.ones(1, 3).bool(), torch.tensor([6]), 2
    )
    assert counts.tolist() == [[2, 2, 2]]


def test_knapsack_of_equal_items_favours_the_first() -> None:
    cost = torch.arange(7, 0, -1.0).expand(1, 4, 7)  # every chunk gains 1: all allocations tie
    counts = reference.knapsack(cost, torch.ones(1, 4).bool(), torch.tensor([17]), 2)
    assert counts.tolist() == [[8, 5, 2, 2]]


@pytest.mark.parametrize(
    ("active", "budget"),
    [
        pytest.param([[1, 1, 1]], [5], id="below the minimum"),
        pytest.param([[1, 1, 1]], [25], id="above the maximum"),
        pytest.param([[1, 0, 1]], [17], id="above what the active items take"),
        pytest.param([[0, 0, 0]], [1], id="nobody to spend it"),
        pytest.param([[1, 1, 1], [1, 1, 1]], [12, 25], id="only the second row"),
    ],
)
def test_knapsack_refuses_a_budget_that_cannot_be_met(
    active: list[list[int]], budget: list[int], generator: torch.Generator
) -> None:
    mask = torch.tensor(active).bool()
    with pytest.raises(ValueError, match="budget"):
        reference.knapsack(random_cost(generator, *mask.shape, 7), mask, torch.tensor(budget), 2)
