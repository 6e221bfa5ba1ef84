# SPDX-License-Identifier: Apache-2.0
"""How the matrix kernel runs for a layer and a number of tokens."""

from dataclasses import dataclass
from typing import Literal

import triton
from torch import Tensor

from ..planes import GEOMETRIC
from .layout import PackedLayer

Mode = Literal["sep", "deq", "shared"]

# Largest block of pairs that each mode compiles to without spills.
LARGEST_BLOCK: dict[Mode, int] = {"sep": 16, "deq": 64, "shared": 32}


@dataclass(frozen=True)
class Config:
    """Constants of one launch of ``expert_gemm``; its docstring says what they mean.

    Attributes:
        mode: ``sep`` or ``deq`` for ``per_chunk`` scales, ``shared`` for ``geometric`` ones.
        block_m: pairs per block.
        planes: planes per step of the loop; always 4 if ``shared``.
        stages: depth of the pipeline.
        split: parts that the columns of w2 are split into, to fill the device at few pairs.
        warps: warps per program.
    """

    mode: Mode
    block_m: int
    planes: int = 4
    stages: int = 3
    split: int = 1
    warps: int = 4

    @property
    def needs_sums(self) -> bool:
        """Offsets are applied to sums of activations."""
        return self.mode != "deq"

    @property
    def scales_columns(self) -> bool:
        """Operands are powers of two that depend on the column."""
        return self.mode != "shared"


def choose(layer: PackedLayer, tokens: int, top_k: int, x: Tensor) -> Config:
    """The configuration for ``tokens`` tokens routed to ``top_k`` experts each."""
    per_expert = triton.next_power_of_2(max(tokens * top_k // layer.num_experts, 1))
    if layer.scale_layout == GEOMETRIC:
        mode: Mode = "shared"
    else:
        mode = "sep" if per_expert <= LARGEST_BLOCK["sep"] else "deq"
    return Config(mode, block_m=min(max(per_expert, 8), LARGEST_BLOCK[mode]))
