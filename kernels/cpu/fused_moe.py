# SPDX-License-Identifier: Apache-2.0
"""Fused MoE on the CPU, host side. The kernel is ``csrc/fused_moe.cpp``."""

import ctypes
import threading

import torch
from torch import Tensor

from . import native
from .packed import PackedLayer

# How activations are rounded, per token and group of columns. ``int8``: tables of int8 partial sums for
# few tokens, int8 values for many. ``int16``: 14-bit values and their exact sums.
PRECISIONS = {"int8": 0, "int16": 1}
# ``auto`` takes the faster method for each (expert, k). Only ``lut`` is bitwise the same for a token
# alone and in any batch, since the methods round activations differently.
PATHS = {"auto": 0, "lut": 1, "tile": 2}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BAD_EXPERT, _BAD_COUNT = 1, 2

_scratch = threading.local()


def fused_moe(
    x: Tensor,
    layer: PackedLayer,
    topk_weights: Tensor,
    topk_ids: Tensor,
    chunk_counts: Tensor,
    activations: str = "int8",
    path: str = "auto",
) -> Tensor:
    """Routed output of one MoE layer.

    Args:
        x: float32, bfloat16 or float16 [T, H].
        layer: the packed experts.
        topk_weights: [T, K] gates, applied to the expert's output.
        topk_ids: int32 or int64 [T, K]; a negative id contributes nothing.
        chunk_counts: int32 or int64 k, [E] (one per expert) or [T, K] (one per token and slot).
        activations: a key of PRECISIONS.
        path: a key of PATHS.

    Returns:
        [T, H] in the dtype of ``x``.

    Raises:
        ValueError: sizes or dtypes that do not fit, an expert id past the last expert, or a k
            outside 1..resident chunks for a pair in use.
    """
    _check(x, layer, topk_weights, topk_ids, chunk_counts)
    x, ids, counts = x.contiguous(), topk_ids.contiguous(), chunk_counts.contiguous()
    weights = topk_weights.float().contiguous()
    out = torch.empty_like(x)
    batch = native.Batch(
        *(x.data_ptr(), weights.data_ptr(), ids.data_ptr(), counts.data_ptr(), out.data_ptr()),
        *(x.shape[0], ids.shape[1], _TYPES[x.dtype], ids.itemsize, counts.itemsize),
        *(counts.dim() == 2, PRECISIONS[activations], PATHS[path]),
    )
    address, isa, library = ctypes.addressof(batch), layer.isa.encode(), native.library()
    scratch = scratch_of_thread(library.moe_scratch(isa, layer.address, address))
    status = library.fused_moe(isa, layer.address, address, scratch.data_ptr())
    if status == _BAD_EXPERT:
        raise ValueError(
            f"expert id {int(ids.max())} with {layer.num_experts} experts in the layer"
        )
    if status == _BAD_COUNT:
        raise ValueError(
            f"a k outside the resident chunks 1..{layer.num_chunks} for an expert in use"
        )
    return out


def scratch_of_thread(size: int) -> Tensor:
    """uint8 scratch of at least ``size`` bytes, kept for the calling thread's next dispatch."""
    held: Tensor | None = getattr(_scratch, "tensor", None)
    if held is None or held.numel() < size:
        held = _scratch.tensor = torch.empty(size, dtype=torch.uint8)
    return held


def _check(x: Tensor, layer: PackedLayer, weights: Tensor, ids: Tensor, counts: Tensor) -> None:
    if x.dtype not in _TYPES or x.dim() != 2 or x.shape[1] != layer.hidden_size:
        raise ValueError(
            f"x must be float32, bfloat16 or float16 [T, {layer.hidden_size}], got {x.dtype} "
            f"{tuple(x.shape)}"
        )
    integers = (torch.int32, torch.int64)
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.dtype not in integers:
        raise ValueError(f"topk_ids must be int32 or int64 [T, K], got {ids.dtype} {ids.shape}")
    if weights.shape != ids.shape:
        raise ValueError(f"topk_weights {tuple(weights.shape)} do not fit ids {tuple(ids.shape)}")
    fits = counts.shape == ids.shape or counts.shape == (layer.num_experts,)
    if not fits or counts.dtype not in integers:
        raise ValueError(
            f"chunk_counts must be int32 or int64 [{layer.num_experts}] or {tuple(ids.shape)}, got "
            f"{counts.dtype} {tuple(counts.shape)}"
        )
