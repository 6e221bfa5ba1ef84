# SPDX-License-Identifier: Apache-2.0
"""A layer's experts in the order in which tensor cores take them.

The kernels compute ``y^T = W x^T``: weights are the A operand of the MMA, from registers. The words of
a plane are therefore laid in fragments of ``mma.m16n8k16`` (and of ``wgmma.m64nNk16`` with A in
registers): one 16-byte load per thread holds all that it needs of a 128 x 128 tile, with no shuffle.

Planes are int32 ``[K, E, rows / 128, columns / 128, 512]``, 2 KiB in one piece per tile:

    word   = (((W * 8 + r) * 4 + q) * 2 + a) * 2 + h     of tile row    a * 64 + W * 16 + h * 8 + r
    bit    = position(p) + 16 i (mod 32)                 of tile column 8 p + 2 q + i

with W, q < 4, r < 8, a, h, i < 2 and p < 16. Scales and offsets are fp16
``[.., E, rows / 128, columns / 128, S, 128]`` with ``((W * 8 + r) * 2 + a) * 2 + h`` in the last place,
where S is the number of groups in a tile.

Rows of w13 are padded so that a tile holds 64 gate rows (a = 0) and the 64 up rows that go with them
(a = 1). Padding is zeros everywhere.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..planes import GEOMETRIC, NUM_TIERS, PER_CHUNK, SCALE_LAYOUTS, PlaneStack, plane_bytes

TILE = 128
TILE_WORDS = TILE * TILE // 32
GROUP_SIZES = (32, 64, 128)

# position(p). ``per_chunk``: a word masked with 0x00010001 << 7 .. 14 is a pair of bf16 powers of two
# (7 .. 10: of fp16); rotations bring every p there. ``geometric``: two butterfly steps over four words
# leave the codes of columns 4 f + r in field f of word r.
_POSITIONS = {
    PER_CHUNK: [7, 8, 9, 10, 11, 12, 13, 14, 31, 0, 1, 2, 3, 4, 5, 6],
    GEOMETRIC: list(range(16)),
}


def padded(size: int) -> int:
    """The next multiple of the tile."""
    return -(-size // TILE) * TILE


def pack_plane(plane: Tensor, columns: int, scale_layout: str, gated: bool) -> Tensor:
    """Words of one plane.

    Args:
        plane: uint8 [E, N, ceil(C / 8)], canonical (bit i of byte c is column 8 c + i).
        columns: C; bits past the last column are dropped.
        scale_layout: chooses the bit order.
        gated: the rows are gate rows, then up rows.

    Returns:
        int32 [E, rows / 128, columns / 128, 512].
    """
    clean = _without_padding_bits(plane, columns)
    missing = padded(columns) // 8 - clean.shape[-1]
    tiles = _tile_rows(torch.nn.functional.pad(clean, (0, missing)), gated)
    # [E, t, a, W, h, r, tile column, p] -> [E, t, tile column, W, r, a, h, p], a byte being 4 q x 2 i
    tiles = tiles.unflatten(-1, (-1, 16)).permute(0, 1, 6, 3, 5, 2, 4, 7).to(torch.int32)
    words = tiles.new_zeros((*tiles.shape[:5], 4, *tiles.shape[5:7]))
    for p, position in enumerate(_POSITIONS[scale_layout]):
        for q in range(4):
            for i in range(2):
                bit = (tiles[..., p] >> (2 * q + i)) & 1
                words[:, :, :, :, :, q] |= bit << ((position + 16 * i) % 32)
    return words.flatten(3)


def unpack_plane(words: Tensor, rows: int, columns: int, scale_layout: str, gated: bool) -> Tensor:
    """Inverse of :func:`pack_plane`: canonical uint8 [E, rows, ceil(columns / 8)]."""
    split = words.unflatten(-1, (4, 8, 4, 2, 2))  # E, t, tile column, W, r, q, a, h
    tiles = split.new_zeros((*split.shape[:5], 2, 2, 16))
    for p, position in enumerate(_POSITIONS[scale_layout]):
        for q in range(4):
            for i in range(2):
                bit = (split[:, :, :, :, :, q] >> ((position + 16 * i) % 32)) & 1
                tiles[..., p] |= bit << (2 * q + i)
    tiles = tiles.permute(0, 1, 5, 3, 6, 4, 2, 7).flatten(-2)
    canonical = _untile_rows(tiles.to(torch.uint8), rows, gated)
    return canonical[..., : plane_bytes(columns)].contiguous()


def pack_sides(side: Tensor, columns: int, group_size: int, gated: bool) -> Tensor:
    """Scales or offsets fp16 [E, N, G] -> fp16 [E, rows / 128, columns / 128, S, 128]."""
    per_tile = TILE // group_size
    missing = padded(columns) // group_size - side.shape[-1]
    tiles = _tile_rows(torch.nn.functional.pad(side, (0, missing)), gated)
    tiles = tiles.unflatten(-1, (-1, per_tile))  # E, t, a, W, h, r, tile column, S
    return tiles.permute(0, 1, 6, 7, 3, 5, 2, 4).flatten(4).contiguous()


def unpack_sides(packed: Tensor, rows: int, groups: int, gated: bool) -> Tensor:
    """Inverse of :func:`pack_sides`: fp16 [E, rows, groups]."""
    split = packed.unflatten(-1, (4, 8, 2, 2))  # E, t, tile column, S, W, r, a, h
    tiles = split.permute(0, 1, 6, 4, 7, 5, 2, 3).flatten(-2)
    return _untile_rows(tiles, rows, gated)[..., :groups].contiguous()


def _without_padding_bits(plane: Tensor, columns: int) -> Tensor:
    """Bits beyond the last column may be anything in storage, and must not reach a result."""
    used = columns % 8
    if not used:
        return plane
    clean = plane.clone()
    clean[..., -1] &= (1 << used) - 1
    return clean


def _tile_rows(matrix: Tensor, gated: bool) -> Tensor:
    """[E, N, *] -> [E, t, a, W, h, r, *], rows padded with zeros."""
    if gated:
        half = matrix.shape[1] // 2
        short = padded(half) - half
        blocks = torch.nn.functional.pad(matrix.unflatten(1, (2, half)), (0, 0, 0, short))
        # 64 gate rows beside their 64 up rows
        return blocks.unflatten(2, (-1, 4, 2, 8)).permute(0, 2, 1, 3, 4, 5, 6)
    short = padded(matrix.shape[1]) - matrix.shape[1]
    return torch.nn.functional.pad(matrix, (0, 0, 0, short)).unflatten(1, (-1, 2, 4, 2, 8))


def _untile_rows(tiles: Tensor, rows: int, gated: bool) -> Tensor:
    """Inverse of :func:`_tile_rows`."""
    if gated:
        blocks = tiles.permute(0, 2, 1, 3, 4, 5, 6).flatten(2, 5)
        return blocks[:, :, : rows // 2].flatten(1, 2)
    return tiles.flatten(1, 5)[:, :rows]


@dataclass(frozen=True)
class MatrixShape:
    """One matrix of all experts: [experts, rows, columns] weights in groups along the columns.

    ``gated``: the rows are gate rows, then up rows (w13).

    Raises:
        ValueError: a group size or scale layout without a kernel, or gated rows that do not halve.
    """

    experts: int
    rows: int
    columns: int
    group_size: int
    scale_layout: str
    gated: bool

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group size {self.group_size}: the GPU kernels take {GROUP_SIZES}")
        if self.scale_layout not in SCALE_LAYOUTS:
            raise ValueError(f"scale_layout {self.scale_layout!r} is not one of {SCALE_LAYOUTS}")
        if self.gated and self.rows % 2:
            raise ValueError(f"{self.rows} rows do not split into gate and up")

    @property
    def row_tiles(self) -> int:
        rows = 2 * padded(self.rows // 2) if self.gated else padded(self.rows)
        return rows // TILE

    @property
    def column_tiles(self) -> int:
        return padded(self.columns) // TILE

    @property
    def groups_per_tile(self) -> int:
        return TILE // self.group_size

    def num_scales(self, num_chunks: int) -> int:
        """Scale tensors of ``num_chunks`` chunks."""
        return num_chunks if self.scale_layout == PER_CHUNK else 1


class PackedMatrix:
    """w13 or w2 of every expert, filled chunk by chunk on the device where it lies.

    Attributes:
        shape: its sizes.
        planes: int32 [K, E, rows / 128, columns / 128, 512], K the number of resident chunks.
        scales: fp16 [K (1 if ``geometric``), E, rows / 128, columns / 128, S, 128].
        offset: fp16 [E, rows / 128, columns / 128, S, 128].
        gain: float32 [E, M, 9], M = 2 if gated, else 1; ones until :meth:`put_sides`.
    """

    def __init__(
        self, shape: MatrixShape, num_chunks: int, device: torch.device | str = "cuda"
    ) -> None:
        tiles = (shape.experts, shape.row_tiles, shape.column_tiles)
        sides = (*tiles, shape.groups_per_tile, TILE)
        self.shape = shape
        self.planes = torch.zeros(num_chunks, *tiles, TILE_WORDS, dtype=torch.int32, device=device)
        self.scales = torch.zeros(
            shape.num_scales(num_chunks), *sides, dtype=torch.float16, device=device
        )
        self.offset = torch.zeros(sides, dtype=torch.float16, device=device)
        blocks = 2 if shape.gated else 1
        self.gain = torch.ones(shape.experts, blocks, NUM_TIERS, dtype=torch.float32, device=device)

    def put(self, chunk: int, plane: Tensor, scale: Tensor | None) -> None:
        """Store one canonical plane uint8 [E, N, ceil(C/8)] and, if ``per_chunk``, its scale fp16
        [E, N, G]; from any device. Packed expert by expert: the temporaries stay small."""
        shape = self.shape
        for e in range(shape.experts):
            here = plane[e : e + 1].to(self.planes.device)
            self.planes[chunk, e] = pack_plane(
                here, shape.columns, shape.scale_layout, shape.gated
            )[0]
        if shape.scale_layout == PER_CHUNK and scale is not None:
            self.scales[chunk] = self._sides(scale)

    def put_sides(self, offset: Tensor, scale: Tensor | None, gain: Tensor) -> None:
        """Store what comes with chunk 0: offset fp16 [E, N, G], gain [E, M, 9] and, if
        ``geometric``, the one scale fp16 [E, N, G]."""
        self.offset.copy_(self._sides(offset))
        self.gain.copy_(gain)
        if self.shape.scale_layout == GEOMETRIC and scale is not None:
            self.scales[0] = self._sides(scale)

    def _sides(self, side: Tensor) -> Tensor:
        shape, here = self.shape, side.to(self.offset.device)
        return pack_sides(here, shape.columns, shape.group_size, shape.gated)

    @classmethod
    def of_stack(cls, stack: PlaneStack, gated: bool, device: torch.device | str) -> "PackedMatrix":
        """Pack a canonical stack."""
        shape = MatrixShape(
            *(stack.num_experts, stack.rows, stack.columns),
            *(stack.group_size, stack.scale_layout, gated),
        )
        packed = cls(shape, stack.num_chunks, device)
        packed.put_sides(stack.offset, stack.scales[0], stack.gain)
        for j, plane in enumerate(stack.planes):
            packed.put(j, plane, stack.scales[j] if j < len(stack.scales) else None)
        return packed


class PackedLayer:
    """Both matrices of a layer, ready for :func:`.fused_moe.fused_moe`.

    Raises:
        ValueError: matrices that are not of one layer.
    """

    def __init__(self, w13: PackedMatrix, w2: PackedMatrix) -> None:
        up, down = w13.shape, w2.shape
        if (up.experts, up.group_size, up.scale_layout, len(w13.planes)) != (
            *(down.experts, down.group_size, down.scale_layout, len(w2.planes)),
        ):
            raise ValueError(f"w13 {up} and w2 {down} are not of one layer")
        if (up.rows, up.columns) != (2 * down.columns, down.rows) or down.gated or not up.gated:
            raise ValueError(f"w13 {up} and w2 {down} do not fit each other")
        self.w13, self.w2 = w13, w2
        self.hidden_size = down.rows
        self.intermediate_size = down.columns
        self.num_experts = up.experts
        self.num_chunks = len(w13.planes)
        self.group_size = up.group_size
        self.scale_layout = up.scale_layout

    @cached_property
    def largest_weight(self) -> float:
        """An upper bound of the size of a weight, gain not applied. Waits for the device once."""
        bounds = []
        for matrix in (self.w13, self.w2):
            tiers = 1 if self.scale_layout == PER_CHUNK else 2
            scales = matrix.scales.float().abs().sum(0) * tiers
            bounds.append((matrix.offset.float().abs() + scales).max())
        return float(torch.stack(bounds).max())

    @classmethod
    def of_stacks(
        cls, w13: PlaneStack, w2: PlaneStack, device: torch.device | str = "cuda"
    ) -> "PackedLayer":
        """Pack the canonical stacks of a layer."""
        return cls(
            PackedMatrix.of_stack(w13, gated=True, device=device),
            PackedMatrix.of_stack(w2, gated=False, device=device),
        )

    def buffers(self) -> dict[str, Tensor]:
        """Every buffer that holds weights, by name."""
        return {
            f"{name}_{part}": getattr(matrix, part)
            for name, matrix in (("w13", self.w13), ("w2", self.w2))
            for part in ("planes", "scales", "offset", "gain")
        }
