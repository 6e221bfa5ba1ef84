# SPDX-License-Identifier: Apache-2.0
"""The compiled allocation of a dispatch against the reference: the same chunk counts, bit for bit."""

import pytest
import torch
from torch import Tensor

from vllm_dpa.kernels import dispatch, reference
from vllm_dpa.kernels.budget import Budget, Rule
from vllm_dpa.kernels.cpu import native

SCOPES = pytest.mark.parametrize("per_token", [False, True], ids=["dispatch", "token"])


def random_dispatch(
    tokens: int, experts: int, top_k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """(gates, ids, table), some gates negative, some slots padding, tables that fall with k."""
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    gates = torch.rand(ids.shape, generator=generator) - 0.1
    table = torch.rand(experts, 9, generator=generator).sort(1, descending=True).values
    return gates, ids, table


@SCOPES
@pytest.mark.parametrize(
    ("rule", "use_gates"), [("knapsack", True), ("knapsack", False), ("uniform", True)]
)
@pytest.mark.parametrize("k_bar", [2.0, 3.5, 4.3, 8.0])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(0, 4, 2), (1, 1, 1), (1, 64, 8), (37, 16, 4), (130, 128, 8)],
)
def test_agrees_with_the_reference(
    tokens: int,
    experts: int,
    top_k: int,
    k_bar: float,
    rule: Rule,
    use_gates: bool,
    per_token: bool,
    generator: torch.Generator,
) -> None:
    gates, ids, table = random_dispatch(tokens, experts, top_k, generator)
    budget = Budget(table, torch.tensor([k_bar], dtype=torch.float32), per_token, rule, use_gates)
    expected = reference.allocate(gates, ids, budget)
    assert torch.equal(native.allocate(gates, ids, budget), expected)
    assert torch.equal(dispatch.allocate(gates, ids, budget), expected)


@SCOPES
def test_ties_go_by_expert_id_not_by_slot(per_token: bool) -> None:
    ids = torch.tensor([[3, 0, 2]])
    table = torch.arange(9.0, 0.0, -1).repeat(4, 1)
    budget = Budget(table, torch.tensor([4.0]), per_token)
    counts = native.allocate(torch.ones(1, 3), ids, budget)
    assert counts.tolist() == ([[2, 8, 2]] if per_token else [8, 0, 2, 2])


@SCOPES
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_odd_gates_agree_too(value: float, per_token: bool, generator: torch.Generator) -> None:
    gates, ids, table = random_dispatch(5, 8, 4, generator)
    gates[2, 1] = value
    budget = Budget(table, torch.tensor([4.0], dtype=torch.float32), per_token)
    expected = reference.allocate(gates, ids, budget)
    assert torch.equal(native.allocate(gates, ids, budget), expected)


@SCOPES
def test_dtypes_and_strides_that_vllm_may_pass(per_token: bool, generator: torch.Generator) -> None:
    gates, ids, table = random_dispatch(6, 8, 4, generator)
    gates = gates.bfloat16()
    budget = Budget(table, torch.tensor([3.0], dtype=torch.float32), per_token)
    expected = reference.allocate(gates, ids, budget)
    strided = native.allocate(gates.T.contiguous().T, ids.int().T.contiguous().T, budget)
    assert torch.equal(strided, expected)


@SCOPES
def test_expert_past_the_table_is_refused(per_token: bool) -> None:
    budget = Budget(torch.ones(4, 9), torch.tensor([4.0]), per_token)
    with pytest.raises(ValueError, match="expert id 4 with 4 experts"):
        native.allocate(torch.ones(1, 2), torch.tensor([[1, 4]]), budget)


def test_a_new_k_bar_is_seen_by_the_next_dispatch() -> None:
    k_bar = torch.tensor([4.0])
    budget = Budget(torch.arange(9.0, 0.0, -1).repeat(4, 1), k_bar, per_token=False)
    for wanted in (4.0, 2.0, 8.0):
        k_bar.fill_(wanted)
        counts = native.allocate(torch.ones(1, 3), torch.tensor([[3, 0, 2]]), budget)
        assert int(counts.sum()) == 3 * wanted


def test_budgets_of_wrong_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="k_bar must be float32"):
        Budget(torch.ones(4, 9), torch.tensor([4.0], dtype=torch.bfloat16), per_token=False)
    with pytest.raises(ValueError, match="table must be float32"):
        Budget(torch.ones(4, 9, dtype=torch.float64), torch.tensor([4.0]), per_token=False)
