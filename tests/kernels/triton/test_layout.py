# SPDX-License-Identifier: Apache-2.0
"""The fragment order: a packed plane unpacks to itself, padding is zero, and each bit lies where the
documented formula says."""

from collections.abc import Callable

import pytest
import torch

from vllm_dpa.kernels.planes import SCALE_LAYOUTS, PlaneStack, num_groups, unpack_bits
from vllm_dpa.kernels.triton.layout import (
    TILE_WORDS,
    MatrixShape,
    PackedLayer,
    PackedMatrix,
    pack_plane,
    pack_sides,
    unpack_plane,
    unpack_sides,
)

StackFactory = Callable[..., PlaneStack]
# rows (a multiple of 2), columns
SIZES = [(256, 128), (384, 256), (2, 1), (100, 36), (130, 129), (272, 320)]

every_size = pytest.mark.parametrize(("rows", "columns"), SIZES)
gated_or_not = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
every_layout = pytest.mark.parametrize("layout", SCALE_LAYOUTS)


@every_layout
@gated_or_not
@every_size
def test_a_plane_unpacks_to_itself(
    rows: int, columns: int, gated: bool, layout: str, make_stack: StackFactory
) -> None:
    plane = make_stack(rows=rows, columns=columns).planes[0]
    words = pack_plane(plane, columns, layout, gated)
    assert words.is_contiguous()
    assert torch.equal(unpack_plane(words, rows, columns, layout, gated), plane)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@gated_or_not
@every_size
def test_scales_unpack_to_themselves(
    rows: int, columns: int, gated: bool, group_size: int, make_stack: StackFactory
) -> None:
    side = make_stack(rows=rows, columns=columns, group_size=group_size).offset
    packed = pack_sides(side, columns, group_size, gated)
    assert torch.equal(unpack_sides(packed, rows, num_groups(columns, group_size), gated), side)


@every_layout
@gated_or_not
def test_bits_beyond_the_last_column_are_dropped(
    gated: bool, layout: str, make_stack: StackFactory
) -> None:
    plane = make_stack(rows=8, columns=36).planes[0]
    dirty = plane.clone()
    dirty[..., -1] |= 0xF0
    clean_words = pack_plane(plane, 36, layout, gated)
    assert torch.equal(pack_plane(dirty, 36, layout, gated), clean_words)


@every_layout
@gated_or_not
def test_each_bit_lies_where_the_formula_says(
    gated: bool, layout: str, make_stack: StackFactory, generator: torch.Generator
) -> None:
    rows, columns = 384, 384
    plane = make_stack(experts=2, rows=rows, columns=columns).planes[0]
    bits = unpack_bits(plane, columns)
    words = pack_plane(plane, columns, layout, gated)
    for _ in range(200):
        expert, row, column = (
            int(torch.randint(0, size, (), generator=generator)) for size in (2, rows, columns)
        )
        tile, in_tile = divmod(row, 128)
        if gated:
            block, of_block = divmod(row, rows // 2)
            tile, in_tile = of_block // 64, block * 64 + of_block % 64
        a, w, h, r = in_tile // 64, in_tile // 16 % 4, in_tile // 8 % 2, in_tile % 8
        p, q, i = column % 128 // 8, column % 8 // 2, column % 2
        position = p if layout == "geometric" else (7 + p if p < 8 else (p - 9) % 32)
        word = int(words[expert, tile, column // 128, (((w * 8 + r) * 4 + q) * 2 + a) * 2 + h])
        assert (word >> ((position + 16 * i) % 32)) & 1 == int(bits[expert, row, column])


@every_layout
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_a_layer_is_padded_to_whole_tiles(
    chunks: int, layout: str, make_stack: StackFactory
) -> None:
    common = {"experts": 2, "scale_layout": layout, "chunks": chunks, "group_size": 64}
    w13 = make_stack(rows=2 * 36, columns=200, row_blocks=2, **common)
    w2 = make_stack(rows=200, columns=36, **common)
    layer = PackedLayer.of_stacks(w13, w2, device="cpu")
    # 36 intermediate rows are padded to the 128 columns of w2, gate and up apart
    assert layer.w13.planes.shape == (chunks, 2, 2, 2, TILE_WORDS)
    assert layer.w2.planes.shape == (chunks, 2, 2, 1, TILE_WORDS)
    scales = 1 if layout == "geometric" else chunks
    assert layer.w13.scales.shape == (scales, 2, 2, 2, 2, 128)
    assert layer.w2.offset.shape == (2, 2, 1, 2, 128)
    assert torch.equal(layer.w2.gain.nan_to_num(), w2.gain.nan_to_num())
    assert (layer.hidden_size, layer.intermediate_size, layer.num_chunks) == (200, 36, chunks)
    assert set(layer.buffers()) == {
        f"{name}_{part}"
        for name in ("w13", "w2")
        for part in ("planes", "scales", "offset", "gain")
    }
    for j in range(chunks):
        canonical = unpack_plane(layer.w13.planes[j], 72, 200, layout, gated=True)
        assert torch.equal(canonical, w13.planes[j])


def test_matrices_that_do_not_fit_are_refused(make_stack: StackFactory) -> None:
    w13 = PackedMatrix.of_stack(make_stack(rows=72, columns=100, row_blocks=2), True, "cpu")
    w2 = PackedMatrix.of_stack(make_stack(rows=100, columns=36, chunks=4), False, "cpu")
    with pytest.raises(ValueError, match="not of one layer"):
        PackedLayer(w13, w2)
    w2 = PackedMatrix.of_stack(make_stack(rows=100, columns=40), False, "cpu")
    with pytest.raises(ValueError, match="do not fit each other"):
        PackedLayer(w13, w2)


def test_a_group_size_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="group size 16"):
        MatrixShape(1, 8, 16, 16, "per_chunk", gated=False)
