# SPDX-License-Identifier: Apache-2.0
"""Progressive codecs: what the encoder and the comparisons need of a way to store weights.

A codec stores a matrix so that its first k parts are a decode of it, for every k. The serving path
reads :class:`SharedScale`, both of whose layouts are this one codec; others can be compared with it
behind the same protocol (``benchmarks/encoders.py``).
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from vllm_dpa.kernels.planes import expert_bytes
from vllm_dpa.profiling.fit.matrix import MatrixCode, MatrixFit, assemble, cut_groups
from vllm_dpa.profiling.fit.stage_a import ROUNDS, fit_groups
from vllm_dpa.profiling.fit.stage_b import Descent
from vllm_dpa.profiling.layer_fit import EncodeOptions

# Sweeps of stage B: the sixth lowers the objective by 0.6 %.
SWEEPS = 6
# Stage A's rounds before them: more of them leave no trace after six sweeps.
START_ROUNDS = 2


class Codec(Protocol):
    """A way to store E matrices [N, C] progressively."""

    def fit(self, weight: Tensor, hessian: Tensor | None) -> Any:
        """The code of float32 [E, N, C]; ``hessian`` float32 [E, C, C] of the inputs, where known."""

    def pack(self, weight: Tensor, code: Any, row_blocks: int, hessian: Tensor | None) -> Any:
        """What is stored of a code. ``row_blocks``: matrices stacked in the rows."""

    def decode(self, code: Any, k: int) -> Tensor:
        """float32 [E, N, C] at tier k, before gains."""

    def cost(self, rows: int, columns: int, k: int) -> int:
        """Bytes of one matrix at tier k."""


@dataclass(frozen=True)
class SharedScale:
    """The stored format: planes with one set of scales and offsets for all tiers.

    Attributes:
        options: layout and group size.
        tier_weights: float32 [9], on the device of the weights.
    """

    options: EncodeOptions
    tier_weights: Tensor

    def fit(self, weight: Tensor, hessian: Tensor | None) -> MatrixCode:
        """Stage A without a Hessian, stage B with one."""
        if hessian is None:
            return self._stage_a(weight, ROUNDS)
        code = self._stage_a(weight, START_ROUNDS)
        descent = Descent(weight, hessian, code, self.tier_weights, self.options.scale_layout)
        for sweep in range(SWEEPS):
            descent.sweep(refit=sweep > 0)
        return code

    def _stage_a(self, weight: Tensor, rounds: int) -> MatrixCode:
        """Every group on its own, all columns weighted alike."""
        groups, mask = cut_groups(weight, self.options.group_size)
        layout = self.options.scale_layout
        fit = fit_groups(groups, mask, self.tier_weights, layout, rounds)
        return MatrixCode.of_groups(fit, weight.shape, self.options.group_size)

    def pack(
        self, weight: Tensor, code: MatrixCode, row_blocks: int, hessian: Tensor | None
    ) -> MatrixFit:
        """Planes, scales, offsets and unbiased gains; see :func:`.fit.matrix.assemble`."""
        return assemble(weight, code, self.options.scale_layout, row_blocks, hessian)

    def decode(self, code: MatrixCode, k: int) -> Tensor:
        return next(tier for j, tier in enumerate(code.tiers(), start=1) if j == k)

    def cost(self, rows: int, columns: int, k: int) -> int:
        return expert_bytes(rows, columns, k, self.options.group_size, self.options.scale_layout)
