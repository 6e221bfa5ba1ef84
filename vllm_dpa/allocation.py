# SPDX-License-Identifier: Apache-2.0
"""Residuals, mode and scope -> the cost of a layer's chunks. No vLLM here.

Cost of giving expert e of layer l its first k chunks: ``G_e * R[l, e, k]`` with gate energy
``G_e = sum over the tokens routed to e of gate^2`` (a negative gate counts as 0), minimised exactly
under a budget of n_active * k_bar chunks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dpa.checkpoint import Residuals
from vllm_dpa.kernels.budget import Budget
from vllm_dpa.kernels.hull import lower_convex_hull
from vllm_dpa.settings import Mode, Scope


@dataclass(frozen=True)
class LayerCost:
    """What a layer's allocator knows before routing.

    Attributes:
        residual: fp32 [E, K + 1], R at index k, already on its lower convex hull; K is the number
            of resident chunks.
        mean_residual: fp32 [K + 1], the layer's mean over experts, for mode ``gate_only``.
    """

    residual: Tensor
    mean_residual: Tensor

    @classmethod
    def of_layer(
        cls, residuals: Residuals | None, index: int, num_experts: int, max_chunks: int
    ) -> "LayerCost":
        """Layer ``index`` of a residual table; the nominal table where a checkpoint has none."""
        if residuals is None:
            return cls.without_residuals(num_experts, max_chunks)
        experts = slice(0, num_experts)
        return cls.from_residuals(
            residuals.r[index, experts], residuals.counts[index, experts], max_chunks
        )

    @classmethod
    def from_residuals(cls, residual: Tensor, counts: Tensor, max_chunks: int) -> "LayerCost":
        """Build from a layer of the residual table.

        Args:
            residual: fp32 [E, 9].
            counts: int64 [E], calibration tokens; experts without any do not enter the mean.
            max_chunks: chunks resident, K.
        """
        hull = lower_convex_hull(residual[:, : max_chunks + 1])
        seen = counts > 0
        return cls(hull, hull[seen].mean(0) if bool(seen.any()) else hull.mean(0))

    @classmethod
    def without_residuals(cls, num_experts: int, max_chunks: int) -> "LayerCost":
        """The nominal table 4^-k for every expert: each further bit quarters a rounding error."""
        nominal = 4.0 ** -torch.arange(max_chunks + 1, dtype=torch.float32)
        return cls(nominal.expand(num_experts, -1).contiguous(), nominal)


def budget_of(cost: LayerCost, k_bar: Tensor, mode: Mode, scope: Scope) -> Budget:
    """What a layer's dispatches may spend, and on what.

    Args:
        cost: the layer's tables.
        k_bar: float32 [1], the budget; kept, not copied.
        mode: what the cost is made of; ``uniform`` gives every expert rint(k_bar).
        scope: ``dispatch`` or ``token``.
    """
    table = cost.residual
    if mode == "gate_only":
        table = cost.mean_residual.expand(table.shape[0], -1)
    return Budget(
        table,
        k_bar,
        per_token=scope == "token",
        rule="uniform" if mode == "uniform" else "knapsack",
        use_gates=mode != "residual_only",
    )
