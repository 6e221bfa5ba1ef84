# SPDX-License-Identifier: Apache-2.0
"""Fused MoE on the CPU, host side. The kernel is ``csrc/fused_moe.cpp``."""

import ctypes
import threading

import torch
from torch import Tensor

from ..budget import Budget
from . import native
from .packed import PackedLayer

# How activations are rounded, per token and group of columns. ``int8``: tables of int8 partial sums for
# few tokens, int8 values for many. ``int16``: 14-bit values and their exact sums.
PRECISIONS = {"int8": 0, "int16": 1}
# ``auto`` takes the faster method for each (expert, k). Only ``lut`` is bitwise the same for a token
# alone and in any batch, since the methods round activations differently.
PATHS = {"auto": 0, "lut": 1, "tile": 2}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BAD_EXPERT, _BAD_COUNT = -1, -2

_scratch = threading.local()


def fused_moe(
    x: Tensor,
    layer: PackedLayer,
    topk_weights: Tensor,
    topk_ids: Tensor,
    chunks: Tensor | Budget,
    activations: str = "int8",
    path: str = "auto",
) -> Tensor:
    """Routed output of one MoE layer.

    Args:
        x: float32, bfloat16 or float16 [T, H].
        layer: the packed experts.
        topk_weights: [T, K] gates, applied to the expert's output.
        topk_ids: int32 or int64 [T, K]; a negative id contributes nothing.
        chunks: int32 or int64 k, [E] (one per expert) or [T, K] (one per token and slot); or the
            budget under which they are allocated in the same native call.
        activations: a key of PRECISIONS.
        path: a key of PATHS.

    Returns:
        [T, H] in the dtype of ``x``.

    Raises:
        ValueError: sizes or dtypes that do not fit, an expert id past the last expert, or a k
            outside 1..resident chunks for a pair in use.
    """
    _check(x, layer, topk_weights, topk_ids, chunks)
    x, ids = x.contiguous(), topk_ids.contiguous()
    weights = topk_weights.float().contiguous()
    out = torch.empty_like(x)
    counts = budget = None
    count_bytes, per_pair = 8, False
    if isinstance(chunks, Budget):
        budget = ctypes.addressof(native.native_budget(chunks))
    else:
        held = chunks.contiguous()
        counts, count_bytes, per_pair = held.data_ptr(), held.itemsize, held.dim() == 2
    batch = native.Batch(
        *(x.data_ptr(), weights.data_ptr(), ids.data_ptr(), counts, budget, out.data_ptr()),
        *(x.shape[0], ids.shape[1], _TYPES[x.dtype], ids.itemsize, count_bytes, per_pair),
        *(PRECISIONS[activations], PATHS[path]),
    )
    status = _call(layer, batch)
    if status == _BAD_EXPERT:
        raise ValueError(
            f"expert id {int(ids.max())} with {layer.num_experts} experts in the layer"
        )
    if status == _BAD_COUNT:
        raise ValueError(
            f"a k outside the resident chunks 1..{layer.num_chunks} for an expert in use"
        )
    return out


def _call(layer: PackedLayer, batch: native.Batch) -> int:
    """Run the kernel, with more scratch if it asks for it; returns its status."""
    run, arguments = (
        native.library().fused_moe,
        (layer.isa.encode(), layer.address, ctypes.addressof(batch)),
    )
    scratch = scratch_of_thread(0)
    status: int = run(*arguments, scratch.data_ptr(), scratch.numel())
    if status > 0:
        scratch = scratch_of_thread(status)
        status = run(*arguments, scratch.data_ptr(), scratch.numel())
    return status


def scratch_of_thread(size: int) -> Tensor:
    """uint8 scratch of at least ``size`` bytes, kept for the calling thread's next dispatch."""
    held: Tensor | None = getattr(_scratch, "tensor", None)
    if held is None or held.numel() < size:
        held = _scratch.tensor = torch.empty(size, dtype=torch.uint8)
    return held


def _check(
    x: Tensor, layer: PackedLayer, weights: Tensor, ids: Tensor, chunks: Tensor | Budget
) -> None:
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
    if isinstance(chunks, Budget):
        if chunks.num_experts != layer.num_experts or chunks.max_chunks > layer.num_chunks:
            raise ValueError(
                f"a budget for {chunks.num_experts} experts of up to {chunks.max_chunks} chunks does "
                f"not fit a layer of {layer.num_experts} experts with {layer.num_chunks}"
            )
        return
    fits = chunks.shape == ids.shape or chunks.shape == (layer.num_experts,)
    if not fits or chunks.dtype not in integers:
        raise ValueError(
            f"chunks must be int32 or int64 [{layer.num_experts}] or {tuple(ids.shape)}, got "
            f"{chunks.dtype} {tuple(chunks.shape)}"
        )
