# SPDX-License-Identifier: Apache-2.0
"""What an allocator needs to know of one layer before routing."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["knapsack", "uniform"]


@dataclass(frozen=True, eq=False)
class Budget:
    """How the chunks of a layer's dispatches are given out.

    Attributes:
        table: float32 [E, K + 1], cost of an expert at k chunks per unit of gate energy, at index k;
            K is the number of resident chunks, and entries below k = 2 are not used.
        k_bar: float32 [1], mean chunks per active expert. Read at every dispatch, so that writing
            to it changes the next one.
        per_token: one k for each (token, expert) under a budget per token, instead of one for each
            expert under a budget per dispatch.
        rule: ``knapsack`` minimises the sum of gate energy x table exactly; ``uniform`` gives every
            active expert rint(k_bar).
        use_gates: gate energy is the sum of gate^2 over an expert's tokens; else their number.

    Raises:
        ValueError: a table or k_bar of another shape or dtype.
    """

    table: Tensor
    k_bar: Tensor
    per_token: bool
    rule: Rule = "knapsack"
    use_gates: bool = True

    def __post_init__(self) -> None:
        if self.table.dim() != 2 or self.table.dtype != torch.float32:
            raise ValueError(
                f"table must be float32 [E, K + 1], got {self.table.dtype} {tuple(self.table.shape)}"
            )
        if self.k_bar.shape != (1,) or self.k_bar.dtype != torch.float32:
            raise ValueError(
                f"k_bar must be float32 [1], got {self.k_bar.dtype} {tuple(self.k_bar.shape)}"
            )
        object.__setattr__(self, "table", self.table.contiguous())

    @property
    def num_experts(self) -> int:
        return self.table.shape[0]

    @property
    def max_chunks(self) -> int:
        return self.table.shape[1] - 1
