# SPDX-License-Identifier: Apache-2.0
"""Code step of the coordinate descent: the best code of every weight of a block of columns, in turn.

Column j of row n takes the code that minimises, exactly,

    sum_k w_k (H_jj d_k^2 + 2 d_k g_k),   d_k = decode_k(code) - W_j,   k = 2..8

where g_k is the gradient that the errors of all other columns leave on column j.
"""

import torch
from torch import Tensor

from vllm_dpa.kernels.cpu import native
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_CHUNKS, NUM_TIERS

from .codes import sign_table


def descend(
    weight: Tensor,
    hessian: Tensor,
    scale: Tensor,
    offset: Tensor,
    tier_weights: Tensor,
    codes: Tensor,
    error: Tensor,
    gradient: Tensor,
) -> None:
    """Visit the columns of a block once; native on the CPU, :func:`descend_plain` elsewhere.

    Args:
        weight: float32 [E, N, C], C the columns of the block.
        hessian: float32 [E, C, C], the block's own.
        scale: float32 [E, N, 8].
        offset: float32 [E, N].
        tier_weights: float32 [9].
        codes: uint8 [E, N, C], changed.
        error: float32 [E, N, 7, C], decode minus weight at tiers 2..8 under ``codes``; changed.
        gradient: float32 [E, N, 7, C], errors of all columns times the Hessian; used up.
    """
    step = native.descend if weight.device.type == "cpu" else descend_plain
    step(weight, hessian, scale, offset, tier_weights, codes, error, gradient)


def descend_plain(
    weight: Tensor,
    hessian: Tensor,
    scale: Tensor,
    offset: Tensor,
    tier_weights: Tensor,
    codes: Tensor,
    error: Tensor,
    gradient: Tensor,
) -> None:
    """:func:`descend` in plain torch, on any device; all rows of all experts at once."""
    weights = tier_weights[MIN_CHUNKS:]
    steps = scale[:, :, None] * sign_table(scale.device)  # [E, N, 256, 8]
    value = steps.cumsum(-1)[..., MIN_CHUNKS - 1 :]
    square = (value * value) @ weights
    signs = sign_table(scale.device).T.contiguous()
    # Plane p is part of tiers k > p.
    part = torch.arange(NUM_CHUNKS)[:, None] < torch.arange(MIN_CHUNKS, NUM_TIERS)
    share = part.to(weights) * weights  # [8, 7]
    for j in range(weight.shape[-1]):
        coupling = hessian[:, j]
        curvature = coupling[:, j, None, None]
        delta = offset - weight[..., j]
        pull = gradient[..., j] + curvature * (delta[..., None] - error[..., j])  # [E, N, 7]
        cost = curvature * square + (2 * scale * (pull @ share.T)) @ signs
        code = cost.argmin(-1, keepdim=True)
        codes[..., j] = code[..., 0]
        picked = value.gather(2, code[..., None].expand(*code.shape, value.shape[-1]))[:, :, 0]
        change = picked + delta[..., None] - error[..., j]
        error[..., j] += change
        gradient += change[..., None] * coupling[:, None, None]
