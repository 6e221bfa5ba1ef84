# SPDX-License-Identifier: Apache-2.0
"""The bit-plane representation of expert weights, as the kernels see it.

A weight at tier k (DESIGN, "Decode rule") is

    W[n, c] = gain * (offset[n, g] + sum_{j<k} scale[j, n, g] * b_j[n, c]),  b in {-1, +1}

with ``g = c // group_size``. Bit ``i`` of byte ``c`` of a plane is column ``8 * c + i``; 1 means +1.
Bits past the last column are 0 in storage and never used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PER_CHUNK = "per_chunk"
GEOMETRIC = "geometric"
SCALE_LAYOUTS = (PER_CHUNK, GEOMETRIC)

NUM_CHUNKS = 8
MIN_CHUNKS = 2
NUM_TIERS = NUM_CHUNKS + 1  # tables are indexed by k itself, 0..8


def plane_bytes(columns: int) -> int:
    """Bytes of one row of one plane."""
    return -(-columns // 8)


def num_groups(columns: int, group_size: int) -> int:
    """Groups of one row; the last one may be short."""
    return -(-columns // group_size)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bool ``[..., C]`` into uint8 ``[..., ceil(C/8)]``, column 8c+i in bit i of byte c."""
    columns = bits.shape[-1]
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, plane_bytes(columns) * 8 - columns))
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (padded.unflatten(-1, (-1, 8)) * powers).sum(-1, dtype=torch.uint8)


def unpack_bits(plane: Tensor, columns: int) -> Tensor:
    """Unpack uint8 ``[..., ceil(C/8)]`` into bool ``[..., C]``; inverse of :func:`pack_bits`."""
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=plane.device)
    bits = (plane.unsqueeze(-1) & powers) != 0
    return bits.flatten(-2)[..., :columns]


@dataclass(frozen=True)
class PlaneStack:
    """One matrix (w13 or w2) of every expert of a layer, as its first K chunks.

    Attributes:
        planes: K tensors uint8 [E, N, ceil(C/8)].
        scales: fp16 [E, N, G]; K of them for ``per_chunk``, exactly one for ``geometric``.
        offset: fp16 [E, N, G].
        gain: fp32 [E, M, 9], the factor of tier k at index k. M row blocks of equal height share
            the N rows: M = 2 for w13 (gate rows, then up rows), M = 1 for w2.
        columns: C, the number of input columns.
        group_size: columns that share a scale and an offset; the last group may be short.
        scale_layout: ``per_chunk`` or ``geometric``.
    """

    planes: Sequence[Tensor]
    scales: Sequence[Tensor]
    offset: Tensor
    gain: Tensor
    columns: int
    group_size: int
    scale_layout: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.planes) <= NUM_CHUNKS:
            raise ValueError(f"{len(self.planes)} planes; there are 1 to {NUM_CHUNKS}")
        wanted = len(self.planes) if self.scale_layout == PER_CHUNK else 1
        if self.scale_layout not in SCALE_LAYOUTS:
            raise ValueError(f"scale_layout {self.scale_layout!r} is not one of {SCALE_LAYOUTS}")
        if len(self.scales) != wanted:
            raise ValueError(
                f"{len(self.planes)} planes need {wanted} scale tensors in layout "
                f"{self.scale_layout}, got {len(self.scales)}"
            )
        experts, rows, groups = self.offset.shape
        if groups != num_groups(self.columns, self.group_size):
            raise ValueError(
                f"{self.columns} columns in groups of {self.group_size} have "
                f"{num_groups(self.columns, self.group_size)} groups, the offset has {groups}"
            )
        for plane in self.planes:
            if tuple(plane.shape) != (experts, rows, plane_bytes(self.columns)):
                raise ValueError(f"plane of shape {tuple(plane.shape)} does not fit the offset")
        for scale in self.scales:
            if scale.shape != self.offset.shape:
                raise ValueError(f"scale of shape {tuple(scale.shape)} does not fit the offset")
        if self.gain.shape[0] != experts or self.gain.shape[-1] != NUM_TIERS:
            raise ValueError(f"gain must be [{experts}, M, {NUM_TIERS}], got {self.gain.shape}")
        if rows % self.gain.shape[1]:
            raise ValueError(f"{rows} rows do not split into {self.gain.shape[1]} gain blocks")

    @property
    def num_experts(self) -> int:
        return self.offset.shape[0]

    @property
    def rows(self) -> int:
        return self.offset.shape[1]

    @property
    def num_chunks(self) -> int:
        """Chunks present, 1..8: the largest k that can be decoded."""
        return len(self.planes)

    def check_chunks(self, k: int) -> None:
        """Raise ValueError unless tier ``k`` can be decoded."""
        if not 1 <= k <= self.num_chunks:
            raise ValueError(f"k = {k} is outside the resident chunks 1..{self.num_chunks}")

    def plane_scale(self, expert: int, j: int) -> Tensor:
        """Scale of plane ``j`` of one expert, fp16 [N, G] (halved per plane if geometric)."""
        if self.scale_layout == PER_CHUNK:
            return self.scales[j][expert]
        # Exact in fp32; fp16 would lose the low planes of small groups to denormals.
        return self.scales[0][expert].float() * 2.0**-j


def expert_bytes(rows: int, columns: int, k: int, group_size: int, scale_layout: str) -> int:
    """Bytes of one expert matrix [rows, columns] at tier k: planes, scales and offset.

    Per weight at group 128: (1.125 k + 0.125) / 8 for ``per_chunk``, (k + 0.25) / 8 for
    ``geometric``. The gain (one float per matrix and tier) is not counted.
    """
    side = 2 * num_groups(columns, group_size)
    scales = k if scale_layout == PER_CHUNK else 1
    return rows * (k * plane_bytes(columns) + (scales + 1) * side)
