# SPDX-License-Identifier: Apache-2.0
"""The compiled extension, called through ctypes with raw pointers (the GIL is released meanwhile).

Sources in ``csrc/``; built by ``pip install``. Every function here checks what C++ then trusts.
"""

import ctypes
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from ..reference import check_budget

INTERFACE_VERSION = 1


@cache
def library() -> ctypes.CDLL:
    """The loaded extension.

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
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    loaded.vllm_dpa_knapsack.argtypes = [pointer] * 3 + [integer] * 4 + [pointer]
    loaded.vllm_dpa_knapsack.restype = None
    return loaded


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
    library().vllm_dpa_knapsack(
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
