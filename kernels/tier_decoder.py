# SPDX-License-Identifier: Apache-2.0
"""Decodes whole expert matrices in plain torch, for profiling and inspection; no kernel does."""

import torch
from torch import Tensor

from .planes import PlaneStack, unpack_bits


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
