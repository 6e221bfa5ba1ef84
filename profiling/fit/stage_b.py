# SPDX-License-Identifier: Apache-2.0
"""Stage B: coordinate descent on all tiers under the full Hessian of an expert's inputs.

The objective of a matrix W [N, C] with inputs x is the output error, all tiers together,

    F = sum_k w_k tr(D_k H D_k^T),   D_k = decode_k - W,   H = E[x x^T],   k = 2..8.

From the codes and scales of stage A, a sweep visits the groups of columns. At each one the gradient
D_k H of every tier on the group's columns is formed, the group's scales and offset are solved for
exactly given the codes, and then each column in turn takes the best of the 256 codes for every row.
No step raises F: rounded scales are taken only where they lower it.
"""

import torch
from torch import Tensor

from vllm_dpa.kernels.planes import GEOMETRIC, MIN_CHUNKS, NUM_CHUNKS, NUM_TIERS

from .code_step import descend
from .codes import sign_table
from .matrix import MatrixCode
from .scales import DAMPING, tail_weights
from .stage_a import HALVINGS

TIERS = slice(MIN_CHUNKS, NUM_TIERS)


class Descent:
    """Coordinate descent on E matrices at once; holds the errors of all tiers.

    Args:
        weight: float32 [E, N, C].
        hessian: float32 [E, C, C], symmetric, positive definite (damped).
        code: where to start; changed in place.
        tier_weights: float32 [9], index k.
        scale_layout: ``per_chunk`` or ``geometric``.
    """

    def __init__(
        self,
        weight: Tensor,
        hessian: Tensor,
        code: MatrixCode,
        tier_weights: Tensor,
        scale_layout: str,
    ) -> None:
        self.weight, self.hessian, self.code = weight, hessian, code
        self.tier_weights = tier_weights
        self._refit = _ScaleStep(tier_weights, scale_layout)
        groups = range(code.offset.shape[-1])
        self.error = torch.cat([self._error_of(g) for g in groups], dim=-1)

    def _error_of(self, g: int) -> Tensor:
        """D of a group under its present code, float32 [E, N, 7, width]."""
        code, group = self.code, self.code.group(g)
        signs = sign_table(code.codes.device)[code.codes[..., group].long()]
        steps = (signs * code.scale[:, :, g, None]).cumsum(-1)[..., MIN_CHUNKS - 1 :]
        base = code.offset[:, :, g, None] - self.weight[..., group]
        return (steps + base[..., None]).transpose(-1, -2).contiguous()

    def objective(self) -> Tensor:
        """F of every matrix, float64 [E]."""
        flat = self.error.flatten(1, 2)
        energy = (flat @ self.hessian).mul_(flat).sum(-1, dtype=torch.float64)
        per_tier = energy.view(*self.error.shape[:3]).sum(1)
        return per_tier @ self.tier_weights[TIERS].double()

    def sweep(self, refit: bool) -> None:
        """Visit every group once; ``refit``: its scales too, else the codes alone."""
        for g in range(self.code.offset.shape[-1]):
            group = self.code.group(g)
            hessian = self.hessian[:, group, group].contiguous()
            error = self.error[..., group].contiguous()
            shape = error.shape
            gradient = (self.error.flatten(1, 2) @ self.hessian[..., group]).view(shape)
            if refit:
                self._refit.step(self.code, g, gradient, hessian)
                fresh = self._error_of(g)
                gradient += ((fresh - error).flatten(1, 2) @ hessian).view(shape)
                error = fresh
            codes = self.code.codes[..., group].contiguous()
            descend(
                self.weight[..., group].contiguous(),
                hessian,
                self.code.scale[:, :, g].contiguous(),
                self.code.offset[:, :, g].contiguous(),
                self.tier_weights,
                *(codes, error, gradient.contiguous()),
            )
            self.code.codes[..., group] = codes
            self.error[..., group] = error


class _ScaleStep:
    """Exact scales and offset of one group, given its codes and all other groups.

    With the basis b_0 = 1, b_j = sign of plane j - 1, the change x of (offset, scales) costs

        x^T A x + 2 x^T y,   A_ij = T(max(i, j)) b_i^T H b_j,   y_i = sum_{k >= i} w_k b_i^T (D_k H)

    (T as in :mod:`.scales`), so x = -A^-1 y. In the geometric layout x is restricted to an offset
    and one scale.
    """

    def __init__(self, tier_weights: Tensor, scale_layout: str) -> None:
        self._weights = tier_weights
        self._geometric = scale_layout == GEOMETRIC
        tail = tail_weights(tier_weights.cpu())
        index = torch.arange(NUM_TIERS)
        self._pair_tail = tail[torch.maximum(index[:, None], index)].to(tier_weights.device)
        # Tier k (from 2) is decoded from the offset and planes 0..k-1.
        part = (index[:, None] <= torch.arange(MIN_CHUNKS, NUM_TIERS)).double()
        self._share = part.to(tier_weights.device) * tier_weights[TIERS].double()
        expand = torch.zeros(NUM_TIERS, 2, dtype=torch.float64)
        expand[0, 0] = 1
        expand[1:, 1] = HALVINGS.double()
        self._expand = expand.to(tier_weights.device)

    def step(self, code: MatrixCode, g: int, gradient: Tensor, hessian: Tensor) -> None:
        """Replace the scales and offset of group ``g`` in ``code`` where that lowers F.

        Args:
            code: the whole code.
            g: the group.
            gradient: float32 [E, N, 7, width], D_k H on the group's columns.
            hessian: float32 [E, width, width], the group's own.
        """
        group = code.group(g)
        codes = code.codes[..., group]
        signs = sign_table(codes.device)[codes.long()]
        basis = torch.nn.functional.pad(signs, (1, 0), value=1.0).transpose(-1, -2)  # [E, N, 9, w]
        gram = (basis.flatten(1, 2) @ hessian).view(basis.shape) @ basis.transpose(-1, -2)
        gram = gram.double() * self._pair_tail
        slope = ((basis @ gradient.transpose(-1, -2)).double() * self._share).sum(-1)
        old = torch.cat((code.offset[:, :, g, None], code.scale[:, :, g]), -1).double()
        if self._geometric:
            change = self._solve(self._expand.T @ gram @ self._expand, slope @ self._expand)
            new = old[..., :2] + change
            new = new.half().double() @ self._expand.T
        else:
            new = (old + self._solve(gram, slope)).half().double()
        change = new - old
        gain = ((gram @ change[..., None])[..., 0] * change + 2 * slope * change).sum(-1)
        better = (gain < 0) & new.isfinite().all(-1)
        new = torch.where(better[..., None], new, old)
        # Kernels may assume scales >= 0: the sign goes into the bits.
        negative = new[..., 1:] < 0
        bits = 2 ** torch.arange(NUM_CHUNKS - 1, -1, -1, device=negative.device)
        flips = (negative * bits).sum(-1).to(torch.uint8)
        code.codes[..., group] ^= flips[..., None]
        code.offset[:, :, g] = new[..., 0].float()
        code.scale[:, :, g] = new[..., 1:].abs().float()

    @staticmethod
    def _solve(gram: Tensor, slope: Tensor) -> Tensor:
        damping = DAMPING * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return -torch.linalg.solve(gram + damping[..., None, None] * eye, slope)
