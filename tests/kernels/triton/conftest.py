# SPDX-License-Identifier: Apache-2.0
"""Memory that starts as garbage also where it is of integers: valid ones, so that using them shows in a
result and not as a crash."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def uninitialised_integers_are_ones(
    monkeypatch: pytest.MonkeyPatch, uninitialised_memory_is_nan: None
) -> None:
    def poisoned(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            tensor = real(*args, **kwargs)
            small = tensor.numel() < 2**24  # not what is never touched
            return tensor if tensor.is_floating_point() or not small else tensor.fill_(1)

        return allocate

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
