# SPDX-License-Identifier: Apache-2.0
"""The compiled allocator against the reference: the same chunk counts, bit for bit."""

import pytest
import torch

from vllm_dpa.kernels import reference
from vllm_dpa.kernels.cpu import native

SHAPES = {
    "no-rows": (0, 5, 7),
    "no-items": (3, 0, 7),
    "one-item": (4, 1, 7),
    "one-choice": (4, 6, 1),
    "token-scope": (300, 8, 7),
    "dispatch-of-128-experts": (1, 128, 7),
}


def random_budget(active: torch.Tensor, choices: int, generator: torch.Generator) -> torch.Tensor:
    """Anything from the minimum to the maximum that the active items can meet."""
    n = active.sum(1)
    share = torch.rand(len(n), generator=generator)
    return n * 2 + torch.round(share * n * (choices - 1)).long()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct-costs", "many-ties"])
def test_agrees_with_the_reference(
    shape: tuple[int, int, int], ties: bool, generator: torch.Generator
) -> None:
    rows, items, choices = shape
    cost = torch.rand(shape, generator=generator)
    if ties:
        cost = torch.floor(cost * 3)
    active = torch.rand(rows, items, generator=generator) < 0.8
    budget = random_budget(active, choices, generator)
    expected = reference.knapsack(cost, active, budget, 2)
    assert torch.equal(native.knapsack(cost, active, budget, 2), expected)


def test_costs_that_overflow_or_are_not_numbers(generator: torch.Generator) -> None:
    """Whatever comes in, the two agree."""
    cost = torch.rand(50, 6, 7, generator=generator)
    odd = torch.tensor([torch.inf, torch.nan, 3e38, 1e-45, 0.0])
    place = torch.rand(cost.shape, generator=generator) < 0.3
    pick = torch.randint(0, len(odd), cost.shape, generator=generator)
    cost = torch.where(place, odd[pick], cost)
    active = torch.ones(50, 6, dtype=torch.bool)
    budget = random_budget(active, 7, generator)
    expected = reference.knapsack(cost, active, budget, 2)
    assert torch.equal(native.knapsack(cost, active, budget, 2), expected)


def test_strided_inputs(generator: torch.Generator) -> None:
    cost = torch.rand(7, 6, 4, generator=generator).permute(2, 1, 0)
    active = torch.ones(6, 4, dtype=torch.bool).T
    budget = torch.full((8,), 24)[::2]
    expected = reference.knapsack(cost, active, budget, 2)
    assert torch.equal(native.knapsack(cost, active, budget, 2), expected)


@pytest.mark.parametrize("budget", [11, 49], ids=["too-small", "too-large"])
def test_budget_that_cannot_be_met(budget: int) -> None:
    with pytest.raises(ValueError, match=r"n_active \* \[2, 8\]"):
        native.knapsack(
            torch.zeros(1, 6, 7), torch.ones(1, 6, dtype=torch.bool), torch.tensor([budget]), 2
        )


def test_other_dtypes_and_shapes_are_refused() -> None:
    active, budget = torch.ones(1, 6, dtype=torch.bool), torch.tensor([24])
    with pytest.raises(ValueError, match="float32"):
        native.knapsack(torch.zeros(1, 6, 7, dtype=torch.float64), active, budget, 2)
    with pytest.raises(ValueError, match="active"):
        native.knapsack(torch.zeros(1, 5, 7), active, budget, 2)


def test_stale_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "INTERFACE_VERSION", 99)
    native.library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="build them again"):
            native.library()
    finally:
        native.library.cache_clear()
