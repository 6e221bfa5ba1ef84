# SPDX-License-Identifier: Apache-2.0
"""The compiled extension, called through ctypes with raw pointers (the GIL is released meanwhile).

Sources in ``csrc/``; built by ``pip install``. What C++ trusts is checked by the callers of
:func:`library` in this package.
"""

import ctypes
import os
from functools import cache
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..budget import Budget
from ..reference import check_budget

INTERFACE_VERSION = 4
ISA_VARIABLE = "VLLM_DPA_CPU_ISA"
ISAS = ("amx", "avx512", "avx2", "portable")  # best first

_POINTER, _INT64, _INT32, _NAME = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p


class Matrix(ctypes.Structure):
    """``MoeMatrix`` of kernels.h."""

    _fields_ = (
        ("planes", _POINTER * 8),
        ("sides", _POINTER),
        ("gain", _POINTER),
        ("gain_stride", _INT64),
        ("rows", _INT64),
        ("columns", _INT64),
    )


class Layer(ctypes.Structure):
    """``MoeLayer`` of kernels.h."""

    _fields_ = (
        ("w13", Matrix),
        ("w2", Matrix),
        ("experts", _INT64),
        ("chunks", _INT32),
        ("group_size", _INT32),
        ("geometric", _INT32),
    )


class NativeBudget(ctypes.Structure):
    """``MoeBudget`` of kernels.h."""

    _fields_ = (
        ("table", _POINTER),
        ("k_bar", _POINTER),
        ("experts", _INT64),
        ("max_chunks", _INT64),
        ("per_token", _INT32),
        ("uniform", _INT32),
        ("use_gates", _INT32),
    )


class Batch(ctypes.Structure):
    """``MoeBatch`` of kernels.h."""

    _fields_ = (
        ("x", _POINTER),
        ("weights", _POINTER),
        ("ids", _POINTER),
        ("counts", _POINTER),
        ("budget", _POINTER),
        ("out", _POINTER),
        ("tokens", _INT64),
        ("top_k", _INT64),
        ("type", _INT32),
        ("id_bytes", _INT32),
        ("count_bytes", _INT32),
        ("counts_per_pair", _INT32),
        ("precision", _INT32),
        ("path", _INT32),
    )


# Name without prefix -> (argument types, result type).
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "knapsack": ([_POINTER] * 3 + [_INT64] * 4 + [_POINTER], None),
    "allocate": ([_POINTER] * 3 + [_INT32] + [_INT64] * 2 + [_POINTER], _INT32),
    "find_isa": ([_NAME], _NAME),
    "plane_bytes": ([_INT64] * 3 + [_INT32] * 2, _INT64),
    "sides_bytes": ([_INT64] * 3 + [_INT32] * 2, _INT64),
    "pack_plane": ([_NAME] + [_POINTER] * 2 + [_INT64] * 4 + [_INT32, _POINTER], None),
    "pack_sides": ([_POINTER] * 2 + [_INT64] * 3 + [_INT32, _POINTER], None),
    "read_stream": ([_POINTER, _INT64], ctypes.c_uint64),
    "descend": ([_POINTER] * 8 + [_INT64] * 2, None),
    "fused_moe": ([_NAME] + [_POINTER] * 3 + [_INT64], _INT64),
}


@cache
def library() -> ctypes.CDLL:
    """The loaded extension.

    torch is imported before it, so that its libgomp is the one that both use: one pool of threads, with
    the number and the binding that vLLM gave it.

    Raises:
        RuntimeError: it was not built, or from other sources than these.
    """
    try:
        module = import_module("._native", __package__)
    except ImportError as error:
        raise RuntimeError(
            f"the native CPU kernels are not built ({error}); install the project with pip, in a "
            "checkout: pip install -e ."
        ) from None
    loaded = ctypes.CDLL(str(module.__file__))
    version = loaded.vllm_dpa_interface_version()
    if version != INTERFACE_VERSION:
        raise RuntimeError(
            f"the native CPU kernels have interface {version}, these sources need "
            f"{INTERFACE_VERSION}; build them again: pip install -e ."
        )
    for name, (arguments, result) in _FUNCTIONS.items():
        function = getattr(loaded, f"vllm_dpa_{name}")
        function.argtypes, function.restype = arguments, result
        setattr(loaded, name, function)
    return loaded


def available_isas() -> list[str]:
    """Instruction sets that this build has and this processor can run, best first."""
    return [isa for isa in ISAS if library().find_isa(isa.encode()) is not None]


def active_isa() -> str:
    """The instruction set in use: the best available one, or what VLLM_DPA_CPU_ISA names.

    Raises:
        RuntimeError: the variable names one that is unknown or not available.
    """
    wanted = os.environ.get(ISA_VARIABLE, "")
    available = available_isas()
    if not wanted:
        return available[0]
    if wanted not in available:
        raise RuntimeError(
            f"{ISA_VARIABLE}={wanted} is not available on this machine; available: "
            f"{', '.join(available)}"
        )
    return wanted


def knapsack(cost: Tensor, active: Tensor, budget: Tensor, min_chunks: int) -> Tensor:
    """Exact allocator; arguments, result and errors of :func:`..reference.knapsack`, for float32 cost
    on the CPU. Agrees with it bit for bit."""
    rows, items, choices = cost.shape
    if cost.dtype != torch.float32 or active.shape != (rows, items) or budget.shape != (rows,):
        raise ValueError(
            f"cost must be float32 [B, n, C], active [B, n] and budget [B]; got {cost.dtype} "
            f"{tuple(cost.shape)}, {tuple(active.shape)} and {tuple(budget.shape)}"
        )
    check_budget(active, budget, min_chunks, choices)
    cost, active, budget = cost.contiguous(), active.bool().contiguous(), budget.long().contiguous()
    counts = torch.empty(rows, items, dtype=torch.int64)
    library().knapsack(
        cost.data_ptr(),
        active.data_ptr(),
        budget.data_ptr(),
        rows,
        items,
        choices,
        min_chunks,
        counts.data_ptr(),
    )
    return counts


_budgets: WeakKeyDictionary[Budget, NativeBudget] = WeakKeyDictionary()


def native_budget(budget: Budget) -> NativeBudget:
    """The structure for ``budget`` in C++, made once; it points into the budget's tensors."""
    held = _budgets.get(budget)
    if held is None:
        held = _budgets[budget] = NativeBudget(
            *(budget.table.data_ptr(), budget.k_bar.data_ptr()),
            *(budget.num_experts, budget.max_chunks),
            *(budget.per_token, budget.rule == "uniform", budget.use_gates),
        )
    return held


def allocate(gates: Tensor, topk_ids: Tensor, budget: Budget) -> Tensor:
    """Chunk counts of one dispatch; arguments and result of :func:`..reference.allocate`, which it
    matches bit for bit.

    Raises:
        ValueError: an expert id past the table.
    """
    gates = gates.float().contiguous()
    ids = topk_ids.contiguous() if topk_ids.itemsize in (4, 8) else topk_ids.long()
    tokens, top_k = ids.shape
    shape = (tokens, top_k) if budget.per_token else (budget.num_experts,)
    counts = torch.empty(shape, dtype=torch.int64)
    status = library().allocate(
        ctypes.addressof(native_budget(budget)),
        *(gates.data_ptr(), ids.data_ptr(), ids.itemsize, tokens, top_k, counts.data_ptr()),
    )
    if status:
        raise ValueError(
            f"expert id {int(ids.max())} with {budget.num_experts} experts in the table"
        )
    return counts


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
    """Code step of the encoder's coordinate descent on one block of columns of E matrices.

    Args:
        weight: float32 [E, N, C].
        hessian: float32 [E, C, C], the block's own.
        scale: float32 [E, N, 8].
        offset: float32 [E, N].
        tier_weights: float32 [9].
        codes: uint8 [E, N, C], changed.
        error: float32 [E, N, 7, C], decode minus weight at tiers 2..8 under ``codes``; changed.
        gradient: float32 [E, N, 7, C], errors of all columns times the Hessian; used up.
    """
    experts, rows, columns = weight.shape
    shapes = {
        "hessian": (hessian, (experts, columns, columns)),
        "scale": (scale, (experts, rows, 8)),
        "offset": (offset, (experts, rows)),
        "tier_weights": (tier_weights, (9,)),
        "codes": (codes, (experts, rows, columns)),
        "error": (error, (experts, rows, 7, columns)),
        "gradient": (gradient, (experts, rows, 7, columns)),
    }
    for name, (tensor, shape) in shapes.items():
        dtype = torch.uint8 if name == "codes" else torch.float32
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} {shape}")
    for e in range(experts):
        library().descend(
            *(t[e].data_ptr() for t in (weight, hessian, scale, offset)),
            tier_weights.data_ptr(),
            *(t[e].data_ptr() for t in (codes, error, gradient)),
            *(rows, columns),
        )
