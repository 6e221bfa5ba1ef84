# SPDX-License-Identifier: Apache-2.0
"""Fused MoE on the CPU in plain torch: decodes only the experts and chunks in use.

Computes in float32 whatever the dtype of ``x``. Pairs of (token, slot) that share an expert and a k
share one decode, and an expert used at several k is decoded once, tier after tier.
"""

import torch
from torch import Tensor

from ..planes import PlaneStack, unpack_bits


def fused_moe(
    x: Tensor,
    w13: PlaneStack,
    w2: PlaneStack,
    topk_weights: Tensor,
    topk_ids: Tensor,
    chunk_counts: Tensor,
) -> Tensor:
    """Routed output of one MoE layer; see :func:`..reference.fused_moe` for the arguments.

    Returns:
        [T, H] in the dtype of ``x``. No tokens give an empty tensor.

    Raises:
        ValueError: a k outside 1..resident chunks for a pair in use.
    """
    out = torch.zeros(x.shape[0], w2.rows, dtype=torch.float32, device=x.device)
    pair_token, pair_slot = torch.nonzero(topk_ids >= 0, as_tuple=True)
    pair_expert = topk_ids[pair_token, pair_slot].long()
    pair_k = (
        chunk_counts[pair_expert]
        if chunk_counts.dim() == 1
        else chunk_counts[pair_token, pair_slot]
    ).long()
    x32 = x.float()
    for expert in pair_expert.unique().tolist():
        tiers = pair_k[pair_expert == expert].unique().tolist()
        gate_up, down = TierDecoder(w13, expert), TierDecoder(w2, expert)
        for k in tiers:
            chosen = torch.nonzero((pair_expert == expert) & (pair_k == k), as_tuple=True)[0]
            token, slot = pair_token[chosen], pair_slot[chosen]
            gate, up = (x32[token] @ gate_up.advance(k).T).chunk(2, dim=-1)
            routed = (torch.nn.functional.silu(gate) * up) @ down.advance(k).T
            routed *= topk_weights[token, slot].float()[:, None]
            out.index_add_(0, token, routed)
    return out.to(x.dtype)


class TierDecoder:
    """Decodes one expert matrix to float32, one chunk at a time, for ascending k."""

    def __init__(self, stack: PlaneStack, expert: int) -> None:
        self._stack = stack
        self._expert = expert
        self._k = 0
        groups = stack.offset.shape[-1]
        self._padded = stack.offset.new_zeros(
            (stack.rows, groups, stack.group_size), dtype=torch.float32
        )
        self._padded += stack.offset[expert].float()[..., None]

    def advance(self, k: int) -> Tensor:
        """Weights at tier k, float32 [N, C]; k must not decrease between calls."""
        self._stack.check_chunks(k)
        if k < self._k:
            raise ValueError(f"tier {k} was asked for after tier {self._k}")
        short = self._padded.shape[1] * self._stack.group_size - self._stack.columns
        for j in range(self._k, k):
            bits = unpack_bits(self._stack.planes[j][self._expert], self._stack.columns)
            signs = torch.nn.functional.pad(bits.float(), (0, short)) * 2 - 1
            scale = self._stack.plane_scale(self._expert, j).float()
            self._padded.addcmul_(signs.view_as(self._padded), scale[..., None])
        self._k = k
        weight = self._padded.flatten(1)[:, : self._stack.columns]
        gain = self._stack.gain[self._expert, :, k]
        return (weight.unflatten(0, (len(gain), -1)) * gain[:, None, None]).flatten(0, 1)
