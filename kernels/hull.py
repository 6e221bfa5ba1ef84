# SPDX-License-Identifier: Apache-2.0
"""Lower convex hulls of cost tables, on which allocation by marginal gain is exact."""

import torch
from torch import Tensor

from .planes import MIN_CHUNKS


def lower_convex_hull(residual: Tensor) -> Tensor:
    """Greatest convex, non-increasing minorant of R over k = 2..K, per expert.

    A table that rises or bulges in k is measurement noise; on its hull the marginal gains of
    successive chunks never grow, so that greedy selection by gain is exact.

    Args:
        residual: fp32 [E, K + 1], index k; entries below k = 2 are not used and kept.

    Returns:
        fp32 [E, K + 1].
    """
    out = residual.clone()
    table = residual[:, MIN_CHUNKS:].double().cummin(dim=1).values
    tiers = torch.arange(table.shape[1], dtype=torch.float64, device=table.device)
    hull = table.clone()
    for i in range(len(tiers)):
        for j in range(i + 2, len(tiers)):
            share = (tiers[i + 1 : j] - tiers[i]) / (tiers[j] - tiers[i])
            chord = table[:, i, None] * (1 - share) + table[:, j, None] * share
            hull[:, i + 1 : j] = torch.minimum(hull[:, i + 1 : j], chord)
    out[:, MIN_CHUNKS:] = hull.float()
    return out


def marginal_gains(table: Tensor) -> Tensor:
    """What each further chunk saves on the hull of a cost table.

    Args:
        table: fp32 [E, K + 1], index k; entries below k = 2 are not used.

    Returns:
        fp32 [E, 8]: the gain of chunk 3 + t at index t < K - 2, non-increasing in t; zeros beyond.
    """
    hull = lower_convex_hull(table)[:, MIN_CHUNKS:]
    gains = (hull[:, :-1] - hull[:, 1:]).clamp_min(0)
    if gains.shape[1]:
        gains = gains.cummin(1).values
    return torch.nn.functional.pad(gains, (0, 8 - gains.shape[1])).contiguous()


def is_convex(table: Tensor) -> bool:
    """Whether a cost table [E, K + 1] is its own hull, up to the rounding of float32."""
    used, hull = table[:, MIN_CHUNKS:], lower_convex_hull(table)[:, MIN_CHUNKS:]
    return bool((used - hull <= 1e-6 * used.abs().amax(1, keepdim=True)).all())
