# SPDX-License-Identifier: Apache-2.0
"""Chunk counts of a dispatch: budgets are met exactly, and the counts depend on what they should
(gates, residuals, ids) and on nothing else (batch mates, order, the scale of the gates)."""

import dataclasses
import itertools
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_dpa.allocation import LayerCost, budget_of, lower_convex_hull
from vllm_dpa.kernels import dispatch
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_CHUNKS
from vllm_dpa.kernels.reference import budget_chunks
from vllm_dpa.settings import Mode, Scope

MODES: tuple[Mode, ...] = get_args(Mode)
SCOPES: tuple[Scope, ...] = get_args(Scope)
EXACT_MODES = [mode for mode in MODES if mode != "uniform"]

both_scopes = pytest.mark.parametrize("scope", SCOPES)
every_mode = pytest.mark.parametrize("mode", MODES)
every_exact_mode = pytest.mark.parametrize("mode", EXACT_MODES)


def budget(k_bar: float) -> Tensor:
    return torch.tensor([k_bar], dtype=torch.float32)


def allocate(
    gates: Tensor, ids: Tensor, cost: LayerCost, k_bar: Tensor, mode: Mode, scope: Scope
) -> Tensor:
    return dispatch.allocate(gates, ids, budget_of(cost, k_bar, mode, scope))


def expected_chunks(n_active: int, k_bar: float, max_chunks: int) -> int:
    """B = clamp(rint(n * k_bar), 2 n, K n), of the float32 that the budget is kept in."""
    wanted = round(n_active * float(budget(k_bar)))  # Python, too, rounds halves to even
    return min(max(wanted, n_active * MIN_CHUNKS), n_active * max_chunks)


@dataclasses.dataclass
class Routing:
    """What one layer sees of a dispatch, and its cost tables."""

    gates: Tensor
    ids: Tensor
    cost: LayerCost
    k_bar: float

    @property
    def max_chunks(self) -> int:
        return self.cost.residual.shape[1] - 1

    def counts(self, scope: Scope, mode: Mode = "dpa") -> Tensor:
        return allocate(self.gates, self.ids, self.cost, budget(self.k_bar), mode, scope)

    def rows(self, index: object) -> "Routing":
        return dataclasses.replace(self, gates=self.gates[index], ids=self.ids[index])

    def slots(self, order: Tensor) -> "Routing":
        """The same routing with every row's slots in the given order, int64 [T, K]."""
        gates, ids = self.gates.gather(1, order), self.ids.gather(1, order)
        return dataclasses.replace(self, gates=gates, ids=ids)

    def total_cost(self, counts: Tensor) -> float:
        """Cost of counts [E] in scope ``dispatch``, mode ``dpa``, in float64."""
        energy = torch.zeros(len(counts), dtype=torch.float64)
        real = self.ids >= 0
        energy.index_add_(0, self.ids[real], self.gates.double().clamp_min(0)[real] ** 2)
        active = counts > 0
        r = self.cost.residual.double()[active].gather(1, counts[active, None])[:, 0]
        return float((energy[active] * r).sum())


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Distinct experts per token, some slots padding, gates of any sign, any resident chunks.

    Gates are multiples of 1/64, so that sums of their squares are exact in any order.
    """
    tokens, experts = draw(st.integers(0, 6)), draw(st.integers(1, 8))
    top_k, max_chunks = draw(st.integers(1, min(4, experts))), draw(st.integers(2, 8))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = torch.rand(tokens, experts, generator=seed).argsort(1)[:, :top_k]
    padding = torch.rand(tokens, top_k, generator=seed) < draw(st.sampled_from([0, 0.2, 0.7, 1]))
    gates = torch.randint(-32, 65, (tokens, top_k), generator=seed) / 64
    table = torch.rand(experts, NUM_CHUNKS + 1, generator=seed) * 4.0 ** -torch.arange(9.0)
    calibrated = torch.randint(0, 3, (experts,), generator=seed)
    cost = LayerCost.from_residuals(table, calibrated, max_chunks)
    # Multiples of 1/2 also meet budgets that are halves, which round to even.
    k_bar = draw(st.floats(2, 8, width=32) | st.integers(4, 16).map(lambda halves: halves / 2))
    return Routing(gates, ids.masked_fill(padding, -1), cost, k_bar)


many = settings(max_examples=40, deadline=None)


# --- budgets ---


@every_exact_mode
@many
@given(routing=routings())
def test_dispatch_spends_exactly_its_budget(mode: Mode, routing: Routing) -> None:
    counts = routing.counts("dispatch", mode)
    assert counts.dtype == torch.int64
    assert counts.shape == (routing.cost.residual.shape[0],)
    active = set(routing.ids[routing.ids >= 0].tolist())
    assert int(counts.sum()) == expected_chunks(len(active), routing.k_bar, routing.max_chunks)


@every_exact_mode
@many
@given(routing=routings())
def test_every_token_spends_exactly_its_budget(mode: Mode, routing: Routing) -> None:
    counts = routing.counts("token", mode)
    assert counts.dtype == torch.int64
    assert counts.shape == routing.ids.shape
    for row, n_active in zip(counts.tolist(), (routing.ids >= 0).sum(1).tolist(), strict=True):
        assert sum(row) == expected_chunks(n_active, routing.k_bar, routing.max_chunks)


@every_mode
@many
@given(routing=routings())
def test_counts_are_within_the_resident_chunks_and_zero_where_nothing_is_routed(
    mode: Mode, routing: Routing
) -> None:
    active = torch.zeros(routing.cost.residual.shape[0], dtype=torch.bool)
    active[routing.ids[routing.ids >= 0]] = True
    for scope, used in (("dispatch", active), ("token", routing.ids >= 0)):
        counts = routing.counts(scope, mode)
        assert bool((counts[used] >= MIN_CHUNKS).all())
        assert bool((counts[used] <= routing.max_chunks).all())
        assert not bool(counts[~used].any())


@both_scopes
@every_mode
@many
@given(routing=routings())
def test_budget_at_either_end_gives_every_expert_the_same(
    scope: Scope, mode: Mode, routing: Routing
) -> None:
    for k in (MIN_CHUNKS, routing.max_chunks):
        counts = dataclasses.replace(routing, k_bar=float(k)).counts(scope, mode)
        assert bool(((counts == k) | (counts == 0)).all())


@both_scopes
@many
@given(routing=routings())
def test_padding_takes_no_part(scope: Scope, routing: Routing) -> None:
    before = routing.counts(scope)
    routing.gates[routing.ids < 0] = 100.0
    assert torch.equal(routing.counts(scope), before)
    # Rows of padding at the end, as a padded batch has them.
    extra = Routing(
        torch.cat((routing.gates, torch.ones(3, routing.gates.shape[1]))),
        torch.cat((routing.ids, torch.full((3, routing.ids.shape[1]), -1))),
        routing.cost,
        routing.k_bar,
    ).counts(scope)
    if scope == "token":
        assert not bool(extra[-3:].any())
        extra = extra[:-3]
    assert torch.equal(extra, before)


@pytest.mark.parametrize(
    ("n_active", "k_bar", "max_chunks", "chunks"),
    [
        pytest.param(3, 4.0, 8, 12, id="whole"),
        pytest.param(3, 4.5, 8, 14, id="13.5 to even 14"),
        pytest.param(1, 2.5, 8, 2, id="2.5 to even 2"),
        pytest.param(1, 3.5, 8, 4, id="3.5 to even 4"),
        pytest.param(8, 4.3, 8, 34, id="34.4 down"),
        pytest.param(2, 8.0, 5, 10, id="more than is resident"),
        pytest.param(5, 2.0, 8, 10, id="minimum"),
        pytest.param(0, 4.0, 8, 0, id="nobody active"),
    ],
)
def test_budget_rounds_to_nearest_and_stays_feasible(
    n_active: int, k_bar: float, max_chunks: int, chunks: int
) -> None:
    assert budget_chunks(torch.tensor([n_active]), budget(k_bar), max_chunks).tolist() == [chunks]


# --- what counts depend on ---


@every_mode
@many
@given(routing=routings())
def test_token_scope_is_independent_of_batch_mates(mode: Mode, routing: Routing) -> None:
    together = routing.counts("token", mode)
    for t in range(len(routing.ids)):
        alone = routing.rows(slice(t, t + 1)).counts("token", mode)
        assert torch.equal(together[t : t + 1], alone)


@every_mode
@many
@given(routing=routings(), seed=st.integers(0, 2**31))
def test_token_scope_permutes_with_the_slots(mode: Mode, routing: Routing, seed: int) -> None:
    noise = torch.rand(routing.ids.shape, generator=torch.Generator().manual_seed(seed))
    order = noise.argsort(1)
    counts = routing.slots(order).counts("token", mode)
    assert torch.equal(counts, routing.counts("token", mode).gather(1, order))


@every_mode
@many
@given(routing=routings(), seed=st.integers(0, 2**31))
def test_dispatch_scope_is_invariant_to_the_order_of_tokens_and_slots(
    mode: Mode, routing: Routing, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(routing.ids.shape, generator=generator).argsort(1)
    shuffled = routing.slots(order).rows(torch.randperm(len(order), generator=generator))
    assert torch.equal(shuffled.counts("dispatch", mode), routing.counts("dispatch", mode))


@many
@given(routing=routings(), seed=st.integers(0, 2**31))
def test_dispatch_scope_costs_the_same_in_any_order_of_tokens_with_rounded_gates(
    routing: Routing, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Sums of these do depend on their order in the last bit, and so may the choice between
    # allocations of equal cost.
    routing.gates = torch.rand(routing.gates.shape, generator=generator)
    shuffled = routing.rows(torch.randperm(len(routing.ids), generator=generator))
    found = shuffled.total_cost(shuffled.counts("dispatch"))
    assert found == pytest.approx(routing.total_cost(routing.counts("dispatch")), rel=1e-6)


@both_scopes
@every_mode
@pytest.mark.parametrize("factor", [2.0, 0.25])
@many
@given(routing=routings())
def test_scaling_all_gates_by_a_power_of_two_changes_nothing(
    scope: Scope, mode: Mode, factor: float, routing: Routing
) -> None:
    scaled = dataclasses.replace(routing, gates=routing.gates * factor)
    assert torch.equal(scaled.counts(scope, mode), routing.counts(scope, mode))


@both_scopes
@every_mode
@many
@given(routing=routings())
def test_negative_gates_count_as_zero(scope: Scope, mode: Mode, routing: Routing) -> None:
    clamped = dataclasses.replace(routing, gates=routing.gates.clamp_min(0))
    assert torch.equal(clamped.counts(scope, mode), routing.counts(scope, mode))


@both_scopes
@many
@given(routing=routings(), seed=st.integers(0, 2**31))
def test_residual_only_ignores_the_gates(scope: Scope, routing: Routing, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    other = dataclasses.replace(
        routing, gates=torch.randn(routing.gates.shape, generator=generator)
    )
    counts = routing.counts(scope, "residual_only")
    assert torch.equal(other.counts(scope, "residual_only"), counts)


@both_scopes
@many
@given(routing=routings(), seed=st.integers(0, 2**31))
def test_gate_only_ignores_differences_between_the_residuals_of_experts(
    scope: Scope, routing: Routing, seed: int
) -> None:
    noise = torch.rand(routing.cost.residual.shape, generator=torch.Generator().manual_seed(seed))
    cost = dataclasses.replace(routing.cost, residual=routing.cost.residual * noise)
    other = dataclasses.replace(routing, cost=cost)
    assert torch.equal(other.counts(scope, "gate_only"), routing.counts(scope, "gate_only"))


@both_scopes
@pytest.mark.parametrize(("k_bar", "k"), [(2.0, 2), (2.5, 2), (3.5, 4), (4.4, 4), (8.0, 8)])
@many
@given(routing=routings())
def test_uniform_gives_everyone_the_rounded_budget(
    scope: Scope, k_bar: float, k: int, routing: Routing
) -> None:
    counts = dataclasses.replace(routing, k_bar=k_bar).counts(scope, "uniform")
    assert bool(((counts == min(k, routing.max_chunks)) | (counts == 0)).all())


@both_scopes
def test_larger_gate_gets_more_chunks(scope: Scope) -> None:
    cost = LayerCost.without_residuals(3, NUM_CHUNKS)
    gates, ids = torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([[0, 1, 2]])
    for mode in ("dpa", "gate_only"):
        low, high, middle = allocate(gates, ids, cost, budget(4.0), mode, scope).flatten().tolist()
        assert low < middle < high


@both_scopes
def test_harder_expert_gets_more_chunks(scope: Scope) -> None:
    residual = torch.tensor([[1.0], [256.0], [16.0]]) * 4.0 ** -torch.arange(9.0)
    cost = LayerCost.from_residuals(residual, torch.ones(3), NUM_CHUNKS)
    gates, ids = torch.full((1, 3), 0.5), torch.tensor([[0, 1, 2]])
    for mode in ("dpa", "residual_only"):
        low, high, middle = allocate(gates, ids, cost, budget(4.0), mode, scope).flatten().tolist()
        assert low < middle < high


@both_scopes
@pytest.mark.parametrize("mode", ["dpa", "gate_only"])
def test_gates_weigh_by_their_square(scope: Scope, mode: Mode) -> None:
    # 16 times the gate is 256 = 4^4 times the energy: four chunks more. By the gate itself, two.
    cost = LayerCost.without_residuals(2, NUM_CHUNKS)
    gates, ids = torch.tensor([[0.8, 0.05]]), torch.tensor([[0, 1]])
    assert allocate(gates, ids, cost, budget(4.0), mode, scope).flatten().tolist() == [6, 2]


def least_cost(energy: Tensor, residual: Tensor, chunks: int) -> float:
    """Lowest sum of energy * residual[k] with k summing to ``chunks``, by trying all."""
    ks = range(MIN_CHUNKS, residual.shape[1])
    table = energy.double()[:, None] * residual.double()
    return min(
        (
            sum(float(table[i, k]) for i, k in enumerate(counts))
            for counts in itertools.product(ks, repeat=len(energy))
            if sum(counts) == chunks
        ),
        default=0.0,
    )


@settings(max_examples=30, deadline=None)
@given(
    experts=st.integers(1, 3),
    tokens=st.integers(1, 4),
    k_bar=st.floats(2, 8, width=32),
    seed=st.integers(0, 2**31),
)
def test_allocation_costs_as_little_as_the_enumerated_optimum(
    experts: int, tokens: int, k_bar: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gates = torch.rand(tokens, experts, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)
    table = torch.rand(experts, 9, generator=generator) * 4.0 ** -torch.arange(9.0)
    cost = LayerCost.from_residuals(table, torch.ones(experts), NUM_CHUNKS)
    chunks = expected_chunks(experts, k_bar, NUM_CHUNKS)

    routing = Routing(gates, ids, cost, k_bar)
    energy = torch.zeros(experts, dtype=torch.float64)
    energy.index_add_(0, ids.flatten(), gates.double().flatten() ** 2)
    found = routing.total_cost(routing.counts("dispatch"))
    assert found == pytest.approx(least_cost(energy, cost.residual, chunks), rel=1e-6)

    counts = routing.counts("token")
    for t in range(tokens):
        energy, residual = gates[t].double() ** 2, cost.residual[ids[t]]
        found = float((energy * residual.double().gather(1, counts[t, :, None])[:, 0]).sum())
        assert found == pytest.approx(least_cost(energy, residual, chunks), rel=1e-6)


def test_dispatch_adds_up_the_squared_gates_of_all_tokens_of_an_expert() -> None:
    # Expert 0 has the largest single gate, expert 1 more energy: 0.49 against 3 * 0.25.
    cost = LayerCost.without_residuals(2, NUM_CHUNKS)
    gates = torch.tensor([[0.7, 0.5], [0.0, 0.5], [0.0, 0.5]])
    ids = torch.tensor([[0, 1]] * 3)
    assert allocate(gates, ids, cost, budget(4.5), "dpa", "dispatch").tolist() == [4, 5]


# --- tie rule ---


def tied_cost(experts: int) -> LayerCost:
    """Every chunk of every expert gains the same: all allocations of a budget are optimal."""
    residual = torch.arange(8.0, -1, -1).expand(experts, 9).contiguous()
    return LayerCost(residual, residual[0].clone())


@every_exact_mode
def test_ties_of_a_dispatch_go_to_the_lower_expert_id(mode: Mode) -> None:
    ids = torch.tensor([[5, 2], [7, 0]])
    counts = allocate(torch.ones(2, 2), ids, tied_cost(8), budget(4.0), mode, "dispatch")
    assert counts.tolist() == [8, 0, 4, 0, 0, 2, 0, 2]


@every_exact_mode
def test_ties_of_a_token_go_to_the_lower_expert_id_not_the_first_slot(mode: Mode) -> None:
    ids = torch.tensor([[5, 2, -1, 7], [3, -1, 6, 1]])
    counts = allocate(torch.ones(2, 4), ids, tied_cost(8), budget(4.0), mode, "token")
    assert counts.tolist() == [[2, 8, 0, 2], [2, 0, 2, 8]]


@both_scopes
def test_odd_chunk_of_equal_experts_goes_to_the_lowest_ids(scope: Scope) -> None:
    cost = LayerCost.without_residuals(6, NUM_CHUNKS)
    ids, gates = torch.tensor([[4, 1, 3]]), torch.full((1, 3), 0.5)
    counts = allocate(gates, ids, cost, budget(8 / 3), "dpa", scope)
    by_id = counts if scope == "dispatch" else torch.zeros(6).long().scatter_(0, ids[0], counts[0])
    assert by_id.tolist() == [0, 3, 0, 3, 2, 0]


@both_scopes
def test_gates_that_are_all_zero_are_one_big_tie(scope: Scope) -> None:
    ids, cost = torch.tensor([[2, 0, 1]]), LayerCost.without_residuals(3, NUM_CHUNKS)
    counts = allocate(torch.tensor([[0.0, -0.5, 0.0]]), ids, cost, budget(4.0), "dpa", scope)
    assert counts.flatten().tolist() == ([8, 2, 2] if scope == "dispatch" else [2, 8, 2])


# --- shapes and types ---


@both_scopes
@every_mode
@pytest.mark.parametrize("max_chunks", [2, 8])
def test_no_tokens_give_no_counts(scope: Scope, mode: Mode, max_chunks: int) -> None:
    cost = LayerCost.without_residuals(5, max_chunks)
    ids = torch.zeros(0, 2, dtype=torch.int64)
    counts = allocate(torch.zeros(0, 2), ids, cost, budget(4.0), mode, scope)
    assert counts.shape == ((5,) if scope == "dispatch" else (0, 2))
    assert counts.dtype == torch.int64
    assert not bool(counts.any())


@both_scopes
@every_mode
def test_only_padding_gives_zeros(scope: Scope, mode: Mode) -> None:
    cost = LayerCost.without_residuals(5, NUM_CHUNKS)
    ids = torch.full((3, 2), -1)
    counts = allocate(torch.ones(3, 2), ids, cost, budget(4.0), mode, scope)
    assert counts.shape == ((5,) if scope == "dispatch" else (3, 2))
    assert not bool(counts.any())


@both_scopes
@every_mode
@many
@given(routing=routings())
def test_ids_may_be_int32(scope: Scope, mode: Mode, routing: Routing) -> None:
    short = dataclasses.replace(routing, ids=routing.ids.int())
    counts = short.counts(scope, mode)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, routing.counts(scope, mode))


@both_scopes
@many
@given(routing=routings())
def test_inputs_are_left_as_they_are(scope: Scope, routing: Routing) -> None:
    tensors = (routing.gates, routing.ids, routing.cost.residual, routing.cost.mean_residual)
    before = [tensor.clone() for tensor in tensors]
    routing.counts(scope)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy)


# --- cost tables ---

tables = st.integers(2, 8).flatmap(
    lambda k: st.lists(
        st.lists(st.floats(0, 1000, width=32), min_size=k + 1, max_size=k + 1),
        min_size=1,
        max_size=4,
    )
)


def hull_by_definition(row: list[float]) -> list[float]:
    """The largest convex non-increasing minorant at every point: the lowest chord over it, with
    the lowest value reached so far standing for every later one."""
    values = [min(row[: i + 1]) for i in range(len(row))]

    def chord(i: int, j: int, x: int) -> float:
        return values[i] + (values[j] - values[i]) * (x - i) / (j - i)

    return [
        min([values[x]] + [chord(i, j, x) for i in range(x) for j in range(x + 1, len(values))])
        for x in range(len(values))
    ]


@settings(max_examples=200, deadline=None)
@given(tables)
def test_hull_is_the_largest_convex_non_increasing_table_below(rows: list[list[float]]) -> None:
    table = torch.tensor(rows)
    hull = lower_convex_hull(table)
    assert torch.equal(hull[:, :MIN_CHUNKS], table[:, :MIN_CHUNKS])
    used = hull[:, MIN_CHUNKS:].double()
    assert bool((used <= table[:, MIN_CHUNKS:]).all())
    steps = used.diff(dim=1)
    assert bool((steps <= 0).all())
    rounding = 1e-6 * float(table.max())  # the hull is rounded to float32
    assert bool((steps.diff(dim=1) >= -rounding).all())
    for found, row in zip(used.tolist(), table[:, MIN_CHUNKS:].tolist(), strict=True):
        assert found == pytest.approx(hull_by_definition(row), abs=rounding)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=6), st.integers(0, 9))
def test_hull_of_a_convex_decreasing_table_is_the_table(gains: list[int], rest: int) -> None:
    gains = sorted(gains)  # from the last step back, each step gains at least as much
    used = [rest + sum(gains[: len(gains) - i]) for i in range(len(gains) + 1)]
    table = torch.tensor([[99.0, 99.0, *used]])
    assert torch.equal(lower_convex_hull(table), table)


def test_hull_of_a_geometric_table_is_the_table() -> None:
    table = 0.3 * 4.0 ** -torch.arange(9.0).expand(3, 9)
    assert torch.equal(lower_convex_hull(table), table)


@settings(max_examples=100, deadline=None)
@given(tables)
def test_hull_of_a_row_does_not_depend_on_the_other_rows(rows: list[list[float]]) -> None:
    together = lower_convex_hull(torch.tensor(rows))
    for i, row in enumerate(rows):
        assert torch.equal(together[i], lower_convex_hull(torch.tensor([row]))[0])


def test_hull_of_an_example_worked_by_hand() -> None:
    # A bulge at k = 3 is cut by the chord from 2 to 4; the rise at k = 5 is flattened.
    table = torch.tensor([[7.0, 5, 8, 7, 2, 4, 2]])
    assert lower_convex_hull(table).tolist() == [[7, 5, 8, 5, 2, 2, 2]]


def test_cost_from_residuals_keeps_the_resident_tiers_and_their_hull() -> None:
    residual = torch.rand(4, 9, generator=torch.Generator().manual_seed(1))
    cost = LayerCost.from_residuals(residual, torch.ones(4, dtype=torch.int64), max_chunks=5)
    assert torch.equal(cost.residual, lower_convex_hull(residual[:, :6]))
    torch.testing.assert_close(cost.mean_residual, cost.residual.mean(0))


def test_experts_without_calibration_tokens_do_not_enter_the_mean() -> None:
    residual = torch.tensor([1.0, 1000, 3])[:, None] * 4.0 ** -torch.arange(9.0)
    cost = LayerCost.from_residuals(residual, torch.tensor([5, 0, 1]), NUM_CHUNKS)
    torch.testing.assert_close(cost.mean_residual, residual[[0, 2]].mean(0))
    torch.testing.assert_close(cost.residual[1], residual[1])


def test_layer_without_any_calibration_tokens_takes_the_mean_of_all() -> None:
    residual = torch.tensor([1.0, 5])[:, None] * 4.0 ** -torch.arange(9.0)
    cost = LayerCost.from_residuals(residual, torch.tensor([0, 0]), NUM_CHUNKS)
    torch.testing.assert_close(cost.mean_residual, residual.mean(0))


@pytest.mark.parametrize("max_chunks", [2, 5, 8])
def test_nominal_cost_quarters_with_every_chunk_for_every_expert(max_chunks: int) -> None:
    cost = LayerCost.without_residuals(3, max_chunks)
    nominal = torch.tensor([4.0**-k for k in range(max_chunks + 1)])
    assert torch.equal(cost.residual, nominal.expand(3, -1))
    assert torch.equal(cost.mean_residual, nominal)
