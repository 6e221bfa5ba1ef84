# SPDX-License-Identifier: Apache-2.0
"""The GPU allocator against the definition: the exact one bit for bit, the one by marginal gains in what
the allocation costs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_dpa.kernels import reference
from vllm_dpa.kernels.budget import Budget
from vllm_dpa.kernels.hull import is_convex, lower_convex_hull
from vllm_dpa.kernels.planes import MIN_CHUNKS
from vllm_dpa.kernels.triton.allocate import Hints, allocate, energies

EXPERTS = 6
# tokens, top_k
BATCHES = {
    "no tokens": (0, 2),
    "one token": (1, 3),
    "one slot": (7, 1),
    "all experts": (2, 6),
    "many tokens": (40, 3),
}

every_batch = pytest.mark.parametrize(("tokens", "top_k"), BATCHES.values(), ids=BATCHES.keys())
both_scopes = pytest.mark.parametrize("per_token", [False, True], ids=["dispatch", "token"])

Routing = tuple[Tensor, Tensor]


@pytest.fixture
def route(generator: torch.Generator) -> Callable[..., Routing]:
    """Gates (some negative) and ids (some padding) of a batch."""

    def make(tokens: int, top_k: int) -> Routing:
        ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :top_k]
        ids[torch.rand(ids.shape, generator=generator) < 0.15] = -1
        return torch.randn(tokens, top_k, generator=generator) + 0.5, ids

    return make


def random_table(generator: torch.Generator, chunks: int = 8, convex: bool = True) -> Tensor:
    size = torch.rand(EXPERTS, 1, generator=generator) + 0.1
    noise = torch.rand(EXPERTS, chunks + 1, generator=generator)
    table = size * 3.0 ** -torch.arange(chunks + 1) * (0.4 + 1.2 * noise)
    return lower_convex_hull(table) if convex else table


def cost(table: Tensor, gates: Tensor, ids: Tensor, counts: Tensor) -> float:
    """What an allocation costs, in float64; counts [E] or [T, K]."""
    real = ids >= 0
    k = counts[ids.clamp_min(0)] if counts.dim() == 1 else counts
    each = gates.clamp_min(0).double() ** 2 * table.double()[ids.clamp_min(0), k.long()]
    return float(each[real].sum())


@both_scopes
@every_batch
@pytest.mark.parametrize("k_bar", [2.0, 3.7, 8.0])
def test_gains_are_as_good_as_the_exact_allocation(
    tokens: int, top_k: int, k_bar: float, per_token: bool, route: Callable[..., Routing],
    generator: torch.Generator,
) -> None:  # fmt: skip
    gates, ids = route(tokens, top_k)
    budget = Budget(random_table(generator), torch.tensor([k_bar]), per_token)
    counts, best = allocate(gates, ids, budget), reference.allocate(gates, ids, budget)
    assert counts.shape == best.shape
    assert torch.equal(counts > 0, best > 0)
    assert torch.equal(counts.sum(-1), best.sum(-1))
    assert bool(((counts == 0) | ((counts >= 2) & (counts <= 8))).all())
    table = budget.table
    assert cost(table, gates, ids, counts) <= cost(table, gates, ids, best) * (1 + 1e-5)


@both_scopes
@every_batch
@pytest.mark.parametrize("convex", [True, False], ids=["hull", "raw"])
def test_exact_allocation_is_that_of_the_definition(
    tokens: int, top_k: int, convex: bool, per_token: bool, route: Callable[..., Routing],
    generator: torch.Generator,
) -> None:  # fmt: skip
    gates, ids = route(tokens, top_k)
    budget = Budget(random_table(generator, convex=convex), torch.tensor([3.7]), per_token)
    counts = allocate(gates, ids, budget, exact=True)
    assert torch.equal(counts.long(), reference.allocate(gates, ids, budget))


@both_scopes
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "gains"])
def test_ties_go_to_the_lower_expert(exact: bool, per_token: bool) -> None:
    table = (4.0 ** -torch.arange(9)).expand(EXPERTS, -1)
    gates, ids = torch.full((1, 4), 0.25), torch.tensor([[5, 0, 3, 2]])
    budget = Budget(table, torch.tensor([2.5]), per_token)
    counts = allocate(gates, ids, budget, exact=exact)
    assert torch.equal(counts.long(), reference.allocate(gates, ids, budget))
    expected = [[2, 3, 2, 3]] if per_token else [3, 0, 3, 2, 0, 2]
    assert counts.tolist() == expected


@both_scopes
@pytest.mark.parametrize("k_bar", [2.0, 2.5, 3.5, 3.51, 8.0])
def test_uniform_rule(k_bar: float, per_token: bool, route: Callable[..., Routing]) -> None:
    gates, ids = route(5, 2)
    table = torch.ones(EXPERTS, 9)
    budget = Budget(table, torch.tensor([k_bar]), per_token, rule="uniform")
    assert torch.equal(allocate(gates, ids, budget).long(), reference.allocate(gates, ids, budget))


@both_scopes
@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_fewer_resident_chunks(
    chunks: int, per_token: bool, route: Callable[..., Routing], generator: torch.Generator
) -> None:
    gates, ids = route(9, 2)
    budget = Budget(random_table(generator, chunks), torch.tensor([6.0]), per_token)
    best = reference.allocate(gates, ids, budget)
    assert torch.equal(allocate(gates, ids, budget).long(), best)
    assert torch.equal(allocate(gates, ids, budget, exact=True).long(), best)


@both_scopes
def test_without_gates_experts_count_by_their_tokens(
    per_token: bool, route: Callable[..., Routing], generator: torch.Generator
) -> None:
    gates, ids = route(12, 2)
    budget = Budget(random_table(generator), torch.tensor([4.0]), per_token, use_gates=False)
    counts = allocate(gates, ids, budget, exact=True)
    assert torch.equal(counts.long(), reference.allocate(gates, ids, budget))
    ones = torch.ones_like(gates)
    best = cost(budget.table, ones, ids, counts)
    assert cost(budget.table, ones, ids, allocate(gates, ids, budget)) <= best * (1 + 1e-5)


@both_scopes
def test_a_raw_table_costs_little_more_than_the_best(
    per_token: bool, route: Callable[..., Routing], generator: torch.Generator
) -> None:
    gaps = []
    for _ in range(8):
        gates, ids = route(6, 3)
        budget = Budget(random_table(generator, convex=False), torch.tensor([3.3]), per_token)
        assert not is_convex(budget.table)
        counts, best = allocate(gates, ids, budget), allocate(gates, ids, budget, exact=True)
        assert bool((counts.sum(-1) <= best.sum(-1)).all())
        at_best = cost(budget.table, gates, ids, best)
        gaps.append(cost(budget.table, gates, ids, counts) / at_best - 1)
    assert sum(gaps) / len(gaps) <= 0.02


@both_scopes
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "gains"])
def test_floors_are_met_and_the_budget_grows_where_it_must(
    exact: bool, per_token: bool, generator: torch.Generator
) -> None:
    gates, ids = torch.rand(2, 3, generator=generator), torch.tensor([[0, 1, 2], [2, 3, -1]])
    floors = torch.tensor([8, 2, 8, 5, 8, 2], dtype=torch.int32)
    budget = Budget(random_table(generator), torch.tensor([2.0]), per_token)
    counts = allocate(gates, ids, budget, exact, Hints(floors=floors))
    # k-bar 2 leaves nothing beyond the floors
    expected = [[8, 2, 8], [8, 5, 0]] if per_token else [8, 2, 8, 5, 0, 0]
    assert counts.tolist() == expected
    budget = Budget(budget.table, torch.tensor([6.0]), per_token)
    counts = allocate(gates, ids, budget, exact, Hints(floors=floors))
    assert counts.sum(-1).tolist() == ([18, 13] if per_token else 24)
    used = floors[ids.clamp_min(0)] if per_token else floors
    assert bool((counts >= used)[counts > 0].all())


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "gains"])
def test_a_heavier_token_moves_chunks_to_its_experts(exact: bool) -> None:
    table = (4.0 ** -torch.arange(9)).expand(EXPERTS, -1)
    gates, ids = torch.full((2, 2), 0.5), torch.tensor([[0, 1], [2, 3]])
    budget = Budget(table, torch.tensor([4.0]), per_token=False)
    for heavy, expected in ((0, [6, 6, 2, 2, 0, 0]), (1, [2, 2, 6, 6, 0, 0])):
        weights = torch.ones(2)
        weights[heavy] = 1e3
        counts = allocate(gates, ids, budget, exact, Hints(token_weights=weights))
        assert counts.tolist() == expected


def test_energies_are_summed_as_in_the_definition(
    route: Callable[..., Routing], generator: torch.Generator
) -> None:
    gates, ids = (v.contiguous() for v in route(1500, 2))  # more than one chunk
    budget = Budget(random_table(generator), torch.tensor([4.0]), per_token=False)
    energy, counts = energies(gates, ids, budget)
    for expert in range(EXPERTS):
        mine = ids == expert
        assert int(counts[expert]) == int(mine.sum())
        expected = (gates.clamp_min(0) ** 2)[mine].double().sum().float()
        torch.testing.assert_close(energy[expert], expected, rtol=1e-6, atol=0)


def test_a_table_of_one_chunk_is_refused() -> None:
    budget = Budget(torch.ones(2, 2), torch.tensor([2.0]), per_token=False)
    with pytest.raises(ValueError, match="at least 2"):
        allocate(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.long), budget)


def test_min_chunks_is_what_the_kernels_are_written_for() -> None:
    assert MIN_CHUNKS == 2
