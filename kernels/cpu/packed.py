# SPDX-License-Identifier: Apache-2.0
"""A layer's experts in the blocks that the CPU kernel reads (csrc/layout.h), chunk by chunk.

Each plane is a buffer of its own, so that it can be loaded, or freed, without the others.
"""

import contextlib
import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from ..planes import GEOMETRIC, NUM_TIERS, PlaneStack, num_groups
from . import native

HUGE_PAGE = 2 * 2**20


def zeros(size: tuple[int, int]) -> Tensor:
    """uint8 zeros; on huge pages from 2 MiB on, where the system has them.

    A decode step streams hundreds of megabytes through the TLB: on 4 KiB pages it takes 1.15 to 1.25
    times as long. What is left over of the last huge page stays on small ones and costs no memory.
    """
    length = size[0] * size[1]
    if length < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % HUGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without huge pages: the small ones work
        memory.madvise(mmap.MADV_HUGEPAGE, start, length // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + length].view(size)


@dataclass(frozen=True)
class MatrixShape:
    """One matrix of all experts: [experts, rows, columns] weights in groups along the columns.

    ``gated``: the rows are gate rows, then up rows (w13).
    """

    experts: int
    rows: int
    columns: int
    group_size: int
    scale_layout: str
    gated: bool

    @property
    def geometric(self) -> bool:
        return self.scale_layout == GEOMETRIC

    def _sizes(self) -> tuple[int, int, int, int, int]:
        return self.rows, self.columns, self.group_size, self.gated, self.geometric

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane of one expert, padding and (``per_chunk``) scales included."""
        return native.library().plane_bytes(*self._sizes())

    @property
    def sides_bytes(self) -> int:
        """Bytes of the offsets (and scales if ``geometric``) of one expert."""
        return native.library().sides_bytes(*self._sizes())


class PackedMatrix:
    """w13 or w2 of every expert.

    Attributes:
        shape: its sizes.
        isa: the instruction set whose bit order it has.
        planes: uint8 [E, plane_bytes], one per resident chunk.
        sides: uint8 [E, sides_bytes].
        gain: float32 [E, M, 9], M = 2 if gated, else 1; ones until :meth:`put_sides`.
    """

    def __init__(self, shape: MatrixShape, num_chunks: int, isa: str | None = None) -> None:
        self.shape = shape
        self.isa = isa or native.active_isa()
        self.planes = [zeros((shape.experts, shape.plane_bytes)) for _ in range(num_chunks)]
        self.sides = zeros((shape.experts, shape.sides_bytes))
        blocks = 2 if shape.gated else 1
        self.gain = torch.ones(shape.experts, blocks, NUM_TIERS, dtype=torch.float32)

    def put(self, chunk: int, plane: Tensor, scale: Tensor | None) -> None:
        """Store one canonical plane uint8 [E, N, ceil(C/8)] and, if ``per_chunk``, its scale fp16
        [E, N, G]."""
        shape = self.shape
        plane, scale = plane.contiguous(), self._scale_of(not shape.geometric, scale)
        native.library().pack_plane(
            self.isa.encode(),
            plane.data_ptr(),
            None if scale is None else scale.data_ptr(),
            *(shape.experts, shape.rows, shape.columns, shape.group_size, shape.gated),
            self.planes[chunk].data_ptr(),
        )

    def put_sides(self, offset: Tensor, scale: Tensor | None, gain: Tensor) -> None:
        """Store what comes with chunk 0: offset fp16 [E, N, G], gain [E, M, 9] and, if
        ``geometric``, the one scale fp16 [E, N, G]."""
        shape = self.shape
        offset, scale = offset.contiguous(), self._scale_of(shape.geometric, scale)
        native.library().pack_sides(
            offset.data_ptr(),
            None if scale is None else scale.data_ptr(),
            *(shape.experts, shape.rows, num_groups(shape.columns, shape.group_size), shape.gated),
            self.sides.data_ptr(),
        )
        self.gain.copy_(gain)

    @staticmethod
    def _scale_of(stored_here: bool, scale: Tensor | None) -> Tensor | None:
        """Scales lie with the planes in one layout and with the sides in the other."""
        return scale.contiguous() if stored_here and scale is not None else None

    @classmethod
    def of_stack(cls, stack: PlaneStack, gated: bool, isa: str | None = None) -> "PackedMatrix":
        """Pack a canonical stack."""
        shape = MatrixShape(
            *(stack.num_experts, stack.rows, stack.columns),
            *(stack.group_size, stack.scale_layout, gated),
        )
        packed = cls(shape, stack.num_chunks, isa)
        packed.put_sides(stack.offset, stack.scales[0], stack.gain)
        for j, plane in enumerate(stack.planes):
            packed.put(j, plane, stack.scales[j] if j < len(stack.scales) else None)
        return packed

    def _view(self) -> native.Matrix:
        view = native.Matrix(
            sides=self.sides.data_ptr(),
            gain=self.gain.data_ptr(),
            gain_stride=self.gain[0].numel(),
            rows=self.shape.rows,
            columns=self.shape.columns,
        )
        for j, plane in enumerate(self.planes):
            view.planes[j] = plane.data_ptr()
        return view


class PackedLayer:
    """Both matrices of a layer, ready for :func:`.fused_moe.fused_moe`."""

    def __init__(self, w13: PackedMatrix, w2: PackedMatrix) -> None:
        up, down = w13.shape, w2.shape
        if (up.experts, up.group_size, up.scale_layout, len(w13.planes), w13.isa) != (
            *(down.experts, down.group_size, down.scale_layout, len(w2.planes), w2.isa),
        ):
            raise ValueError(f"w13 {up} and w2 {down} are not of one layer")
        if (up.rows, up.columns) != (2 * down.columns, down.rows) or down.gated or not up.gated:
            raise ValueError(f"w13 {up} and w2 {down} do not fit each other")
        self.w13, self.w2 = w13, w2
        self.isa = w13.isa
        self.hidden_size = down.rows
        self.num_experts = up.experts
        self.num_chunks = len(w13.planes)
        self.view = native.Layer(
            w13=w13._view(),
            w2=w2._view(),
            experts=up.experts,
            chunks=self.num_chunks,
            group_size=up.group_size,
            geometric=up.geometric,
        )
        self.address = ctypes.addressof(self.view)

    @classmethod
    def of_stacks(cls, w13: PlaneStack, w2: PlaneStack, isa: str | None = None) -> "PackedLayer":
        """Pack the canonical stacks of a layer."""
        return cls(
            PackedMatrix.of_stack(w13, gated=True, isa=isa),
            PackedMatrix.of_stack(w2, gated=False, isa=isa),
        )

    def buffers(self) -> dict[str, Tensor]:
        """Every buffer that holds weights, by name."""
        named: dict[str, Tensor] = {}
        for name, matrix in (("w13", self.w13), ("w2", self.w2)):
            named |= {f"{name}_plane_{j}": plane for j, plane in enumerate(matrix.planes)}
            named |= {f"{name}_sides": matrix.sides, f"{name}_gain": matrix.gain}
        return named
