# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernel tests: fresh random plane stacks, and memory that starts as NaN."""

import os
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_dpa.kernels.planes import (
    GEOMETRIC,
    NUM_CHUNKS,
    NUM_TIERS,
    PER_CHUNK,
    PlaneStack,
    num_groups,
    pack_bits,
)

SEED_VARIABLE = "DPA_TEST_SEED"

StackFactory = Callable[..., PlaneStack]


@pytest.fixture
def generator() -> torch.Generator:
    """Random numbers that are new in every run; the seed is in the output of a failed test."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(2**31))
    print(f"to repeat these inputs: {SEED_VARIABLE}={seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def make_stack(generator: torch.Generator) -> StackFactory:
    """Factory of random plane stacks whose outputs are about as large as their inputs."""

    def make(
        experts: int = 3,
        rows: int = 8,
        columns: int = 100,
        group_size: int = 32,
        scale_layout: str = PER_CHUNK,
        chunks: int = NUM_CHUNKS,
        row_blocks: int = 1,
    ) -> PlaneStack:
        side = (experts, rows, num_groups(columns, group_size))

        def uniform(shape: tuple[int, ...], low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(shape, generator=generator)

        bits = [
            torch.randint(0, 2, (experts, rows, columns), generator=generator).bool()
            for _ in range(chunks)
        ]
        typical = columns**-0.5
        # Halved per plane, but not exactly, so that per_chunk differs from geometric.
        num_scales = 1 if scale_layout == GEOMETRIC else chunks
        scales = [(typical * uniform(side, 0.5, 1.5) * 2.0**-j).half() for j in range(num_scales)]
        gain = uniform((experts, row_blocks, NUM_TIERS), 0.8, 1.25)
        gain[..., 0] = torch.nan  # no tier is called 0: whoever is off by one sees it
        return PlaneStack(
            planes=[pack_bits(plane) for plane in bits],
            scales=scales,
            offset=(typical * uniform(side, -0.5, 0.5)).half(),
            gain=gain,
            columns=columns,
            group_size=group_size,
            scale_layout=scale_layout,
        )

    return make


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Whatever reads memory before writing it gets NaN, instead of zeros by luck."""

    def poisoned(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            tensor = real(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return allocate

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
