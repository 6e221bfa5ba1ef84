# SPDX-License-Identifier: Apache-2.0
"""Write a safetensors file tensor by tensor, in any order, without holding it in memory.

The safetensors library writes a file from tensors that are all in memory. An encoder that goes
through a model layer by layer adds a slice to every chunk file at each layer, so the layout is
declared first and the data follows. The format: 8 bytes little-endian header length, a JSON header
of dtype, shape and byte range per tensor, then the data.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from vllm_dpa.errors import DpaError

DTYPE_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Spec = tuple[torch.dtype, tuple[int, ...]]


class SafetensorsStream:
    """A file whose tensors are declared at the start and may then be put in any order.

    Use as a context manager: leaving it without an error checks that every tensor was put, and
    flushes to disk.
    """

    def __init__(
        self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self._specs = dict(specs)
        self._missing = set(specs)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        position = 0
        # Widest elements first, as the format asks for aligned data.
        for name in sorted(specs, key=lambda n: (-specs[n][0].itemsize, n)):
            dtype, shape = specs[name]
            size = torch.Size(shape).numel() * dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [position, position + size],
            }
            self._offsets[name] = position
            position += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little"))
        self._file.write(text)
        self._data_start = 8 + len(text)
        self._file.truncate(self._data_start + position)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one declared tensor.

        Raises:
            DpaError: dtype or shape are not what was declared.
        """
        dtype, shape = self._specs[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise DpaError(
                f"{self.path.name}: tensor {name} was declared as {dtype} {tuple(shape)}, "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._file.seek(self._data_start + self._offsets[name])
        self._file.write(data)  # type: ignore[arg-type]
        self._missing.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                if self._missing:
                    raise DpaError(
                        f"{self.path.name}: {len(self._missing)} declared tensors were not "
                        f"written, the first is {min(self._missing)}"
                    )
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
