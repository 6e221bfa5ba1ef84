# SPDX-License-Identifier: Apache-2.0
"""Exact scale step: the best scales and offset of every group, given its codes.

The normal equations of the multi-tier objective: with ``b_0 = 1`` for the offset, ``b_j`` the sign of
plane j - 1, and ``T(i) = sum_{k >= i} w_k`` (the offset takes part in every tier),

    A_ij = T(max(i, j)) <b_i, b_j>_h,    y_i = T(i) <b_i, W>_h,    A x = y.
"""

import torch
from torch import Tensor

from vllm_dpa.kernels.planes import NUM_CHUNKS

from .codes import sign_table

# Relative to the mean diagonal of A: keeps groups solvable whose planes are collinear (constant
# weights, fewer columns than planes). Far below the fp16 rounding of the result.
DAMPING = 1e-6


def tail_weights(tier_weights: Tensor) -> Tensor:
    """T(0..8), float64 [9], with T(0) = T(1)."""
    tail = tier_weights.double().flip(0).cumsum(0).flip(0)
    tail[0] = tail[1]
    return tail


def best_scales(
    weight: Tensor, mask: Tensor, codes: Tensor, tier_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Least-squares (offset, scale) of the ``per_chunk`` layout.

    Args:
        weight: float32 [n, G].
        mask: float32 [n, G], the weight h of every column; 0 for padding.
        codes: uint8 [n, G].
        tier_weights: float32 [9].

    Returns:
        (offset float32 [n], scale float32 [n, 8]). Scales may be negative.
    """
    basis = _basis(codes)
    weighted = basis * mask[..., None]
    tail = tail_weights(tier_weights)
    index = torch.arange(NUM_CHUNKS + 1, device=weight.device)
    pair_tail = tail[torch.maximum(index[:, None], index)]
    gram = (weighted.transpose(1, 2) @ basis).double() * pair_tail
    right = (weighted.transpose(1, 2) @ weight[..., None])[..., 0].double() * tail
    solution = _solve(gram, right).float()
    return solution[:, 0], solution[:, 1:]


def best_geometric_scale(
    weight: Tensor, mask: Tensor, codes: Tensor, tier_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Least-squares (offset, scale) of the ``geometric`` layout: scale[j] = scale / 2^j.

    Arguments as in :func:`best_scales`; returns (float32 [n], float32 [n]).
    """
    lead = torch.zeros_like(weight)
    moment, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for j in range(NUM_CHUNKS):
        sign = ((codes >> (NUM_CHUNKS - 1 - j)) & 1).float() * 2 - 1
        lead = lead + sign * 2.0**-j
        moment = moment + tier_weights[j + 1] * lead
        square = square + tier_weights[j + 1] * lead * lead
    total = float(tier_weights.double().sum())
    gram = torch.stack(
        [(mask * total).sum(1), (mask * moment).sum(1), (mask * square).sum(1)], dim=1
    ).double()[:, [0, 1, 1, 2]]
    right = torch.stack(
        [(mask * weight).sum(1) * total, (mask * moment * weight).sum(1)], dim=1
    ).double()
    solution = _solve(gram.view(-1, 2, 2), right).float()
    return solution[:, 0], solution[:, 1]


def _basis(codes: Tensor) -> Tensor:
    """float32 [n, G, 9]: ones, then the signs of the planes."""
    signs = sign_table(codes.device)[codes.long()]
    return torch.nn.functional.pad(signs, (1, 0), value=1.0)


def _solve(gram: Tensor, right: Tensor) -> Tensor:
    damping = DAMPING * gram.diagonal(dim1=1, dim2=2).mean(1)
    damped = gram + damping[:, None, None] * torch.eye(
        gram.shape[1], dtype=gram.dtype, device=gram.device
    )
    return torch.linalg.solve(damped, right)
