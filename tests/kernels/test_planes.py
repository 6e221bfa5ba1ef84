# SPDX-License-Identifier: Apache-2.0
"""The bit-plane format: bit order, padding, validation of a stack, and its size in bytes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_dpa.kernels.planes import (
    GEOMETRIC,
    NUM_CHUNKS,
    PER_CHUNK,
    SCALE_LAYOUTS,
    PlaneStack,
    expert_bytes,
    num_groups,
    pack_bits,
    plane_bytes,
    unpack_bits,
)

COLUMNS = [1, 7, 8, 9, 100, 128, 300]


def random_bits(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator).bool()


@pytest.mark.parametrize("columns", COLUMNS)
def test_unpacking_inverts_packing(columns: int, generator: torch.Generator) -> None:
    bits = random_bits(generator, 2, 5, columns)
    plane = pack_bits(bits)
    assert plane.dtype == torch.uint8
    assert plane.shape == (2, 5, plane_bytes(columns))
    unpacked = unpack_bits(plane, columns)
    assert unpacked.dtype == torch.bool
    assert torch.equal(unpacked, bits)


@pytest.mark.parametrize("columns", COLUMNS)
def test_bit_i_of_byte_c_is_column_8c_plus_i(columns: int, generator: torch.Generator) -> None:
    bits = random_bits(generator, columns)
    plane = pack_bits(bits).tolist()
    assert [(plane[c // 8] >> (c % 8)) & 1 for c in range(columns)] == bits.int().tolist()


def test_bit_order_of_an_example_worked_by_hand() -> None:
    bits = torch.zeros(12, dtype=torch.bool)
    bits[[0, 3, 9]] = True
    assert pack_bits(bits).tolist() == [0b0000_1001, 0b0000_0010]


@pytest.mark.parametrize("columns", COLUMNS)
def test_padding_bits_are_zero_even_if_all_columns_are_one(columns: int) -> None:
    last = int(pack_bits(torch.ones(columns, dtype=torch.bool))[-1])
    used = columns - 8 * (plane_bytes(columns) - 1)
    assert last == 2**used - 1


@pytest.mark.parametrize("columns", [1, 7, 9, 100])
def test_padding_bits_are_not_unpacked(columns: int, generator: torch.Generator) -> None:
    bits = random_bits(generator, columns)
    plane = pack_bits(bits)
    used = columns - 8 * (plane_bytes(columns) - 1)
    plane[-1] |= (0xFF << used) & 0xFF
    assert torch.equal(unpack_bits(plane, columns), bits)


@pytest.mark.parametrize(
    ("columns", "group_size", "groups"),
    [(1, 128, 1), (128, 128, 1), (129, 128, 2), (100, 32, 4), (96, 32, 3), (300, 64, 5)],
)
def test_last_group_may_be_short(columns: int, group_size: int, groups: int) -> None:
    assert num_groups(columns, group_size) == groups


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_stack_says_its_sizes(
    layout: str, chunks: int, make_stack: Callable[..., PlaneStack]
) -> None:
    stack = make_stack(experts=5, rows=6, columns=9, chunks=chunks, scale_layout=layout)
    assert (stack.num_experts, stack.rows, stack.num_chunks) == (5, 6, chunks)


@pytest.mark.parametrize("k", [-1, 0, 4, 9])
def test_check_chunks_refuses_what_is_not_resident(
    k: int, make_stack: Callable[..., PlaneStack]
) -> None:
    stack = make_stack(chunks=3)
    with pytest.raises(ValueError, match=rf"k = {k} .*1\.\.3"):
        stack.check_chunks(k)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_check_chunks_accepts_what_is_resident(
    k: int, make_stack: Callable[..., PlaneStack]
) -> None:
    make_stack(chunks=3).check_chunks(k)


def test_geometric_scale_of_the_last_plane_survives_where_fp16_would_lose_it(
    make_stack: Callable[..., PlaneStack],
) -> None:
    stack = make_stack(experts=1, rows=1, columns=8, scale_layout=GEOMETRIC)
    smallest = 2.0**-24  # the smallest positive fp16
    stack.scales[0].fill_(smallest)
    assert float(stack.plane_scale(0, 7)) == smallest / 128


# What is wrong -> (fields to replace in a good stack, what the message must say). The good stack
# has 2 experts, 6 rows, 20 columns in groups of 32 (one group) and 2 row blocks.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "unknown layout": ({"scale_layout": "linear"}, "linear"),
    "too few scales": ({"scales": [torch.ones(2, 6, 1).half()] * 7}, "8 planes need 8 scale"),
    "one scale per chunk in geometric": ({"scale_layout": GEOMETRIC}, "8 planes need 1 scale"),
    "offset of the wrong number of groups": (
        {"offset": torch.zeros(2, 6, 2).half()},
        "have 1 groups, the offset has 2",
    ),
    "other columns than the planes have": ({"columns": 28}, "plane of shape"),
    "plane of other rows": (
        {"planes": [torch.zeros(2, 5, 3, dtype=torch.uint8)] * 8},
        "plane of shape",
    ),
    "plane of other experts": (
        {"planes": [torch.zeros(3, 6, 3, dtype=torch.uint8)] * 8},
        "plane of shape",
    ),
    "one wrong plane among good ones": (
        {
            "planes": [torch.zeros(2, 6, 3, dtype=torch.uint8)] * 7
            + [torch.zeros(2, 6, 4, dtype=torch.uint8)]
        },
        "plane of shape",
    ),
    "gain of other experts": ({"gain": torch.ones(3, 2, 9)}, "gain must be"),
    "gain of 8 tiers": ({"gain": torch.ones(2, 2, 8)}, "gain must be"),
    "rows that do not split into gain blocks": ({"gain": torch.ones(2, 4, 9)}, "gain blocks"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_stack_that_does_not_fit_together_is_refused(
    change: dict[str, Any], message: str, make_stack: Callable[..., PlaneStack]
) -> None:
    good = make_stack(experts=2, rows=6, columns=20, row_blocks=2)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **change)


@pytest.mark.parametrize("k", range(1, NUM_CHUNKS + 1))
@pytest.mark.parametrize(
    ("layout", "per_k", "fixed"),
    [(PER_CHUNK, 1.125, 0.125), (GEOMETRIC, 1.0, 0.25)],
    ids=[PER_CHUNK, GEOMETRIC],
)
def test_bits_per_weight_at_group_128(layout: str, per_k: float, fixed: float, k: int) -> None:
    rows, columns = 24, 384
    bits = 8 * expert_bytes(rows, columns, k, 128, layout) / (rows * columns)
    assert bits == per_k * k + fixed


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("columns", [1, 36, 100, 300])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_expert_bytes_counts_the_tensors_of_a_stack(
    layout: str, columns: int, k: int, make_stack: Callable[..., PlaneStack]
) -> None:
    stack = make_stack(experts=3, rows=6, columns=columns, scale_layout=layout, chunks=k)
    tensors = [*stack.planes, *stack.scales, stack.offset]
    assert expert_bytes(6, columns, k, 32, layout) == sum(t[0].nbytes for t in tensors)
