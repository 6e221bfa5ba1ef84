# SPDX-License-Identifier: Apache-2.0
"""How the matrix kernel runs for a layer and a number of tokens."""

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from ..planes import GEOMETRIC
from .layout import PackedLayer

Mode = Literal["sep", "deq", "shared"]

# Block sizes that each mode compiles to without spills, and warps and pipeline stages there.
TILES: dict[Mode, dict[int, tuple[int, int]]] = {
    "sep": {8: (4, 3), 16: (4, 3)},
    "deq": {16: (4, 3), 32: (4, 3), 64: (8, 3), 128: (8, 3)},
    "shared": {8: (4, 4), 16: (4, 4), 32: (4, 3)},
}


@dataclass(frozen=True)
class Config:
    """Constants of one launch of ``expert_gemm``; its docstring says what they mean.

    Attributes:
        mode: ``sep`` or ``deq`` for ``per_chunk`` scales, ``shared`` for ``geometric`` ones.
        block_m: pairs per block.
        warps: warps per program.
        stages: depth of the software pipeline.
        planes: planes per step of the loop; always 4 if ``shared``.
        split: parts that the columns of w2 are split into, to fill the device at few pairs.
    """

    mode: Mode
    block_m: int
    warps: int
    stages: int
    planes: int = 4
    split: int = 1

    @classmethod
    def of_tile(cls, mode: Mode, block_m: int, split: int = 1) -> "Config":
        """With the warps and stages that the tile is known to compile well with."""
        return cls(mode, block_m, *TILES[mode][block_m], split=split)

    @property
    def needs_sums(self) -> bool:
        """Offsets are applied to sums of activations."""
        return self.mode != "deq"

    @property
    def scales_columns(self) -> bool:
        """Operands are powers of two that depend on the column."""
        return self.mode != "shared"


def choose(layer: PackedLayer, tokens: int, top_k: int, dtype: torch.dtype) -> Config:
    """The configuration for ``tokens`` tokens routed to ``top_k`` experts each."""
    per_expert = triton.next_power_of_2(max(tokens * top_k // layer.num_experts, 1))
    mode: Mode = "sep"
    if layer.scale_layout == GEOMETRIC:
        mode = "shared"
    elif per_expert > max(TILES["sep"]) and fits_deq(layer, dtype):
        mode = "deq"
    return Config.of_tile(mode, min(max(per_expert, min(TILES[mode])), max(TILES[mode])))


def fits_deq(layer: PackedLayer, dtype: torch.dtype) -> bool:
    """Whether mode ``deq`` can hold the layer's weights: times 2**16, they must be fp16 numbers."""
    return dtype == torch.bfloat16 or layer.largest_weight * 2**16 < torch.finfo(dtype).max
