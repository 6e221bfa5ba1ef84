# SPDX-License-Identifier: Apache-2.0
"""One MoE layer through llama.cpp's own CPU kernels, where llama-cpp-python is installed.

The graph is the one llama.cpp builds for a MoE layer: ``mul_mat_id`` for gate and up, swiglu,
``mul_mat_id`` for down, gates, sum over the slots. Weights lie in the buffer type that llama.cpp itself
would choose (repacked where it has a repacked kernel for the format).
"""

import ctypes
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

F32, I32 = 0, 26  # ggml_type


class Format(NamedTuple):
    """A ggml_type; a row must hold a multiple of ``block`` weights."""

    name: str
    ggml_type: int
    block: int


# The format with the nearest number of bytes per weight at each tier: 2.6, 4.5, 6.6 and 8.5 bits.
FORMATS = {
    2: Format("Q2_K", 10, 256),
    4: Format("Q4_K", 12, 256),
    6: Format("Q6_K", 14, 256),
    8: Format("Q8_0", 8, 32),
}


class _InitParams(ctypes.Structure):
    """``ggml_init_params``."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_silent = _LogCallback(lambda level, text, data: None)

# Function -> (argument types, result type).
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "ggml_log_set": ([_LogCallback, c_void_p], None),
    "ggml_init": ([_InitParams], c_void_p),
    "ggml_free": ([c_void_p], None),
    "ggml_tensor_overhead": ([], c_size_t),
    "ggml_graph_overhead": ([], c_size_t),
    "ggml_new_tensor_2d": ([c_void_p, c_int, c_int64, c_int64], c_void_p),
    "ggml_new_tensor_3d": ([c_void_p, c_int, c_int64, c_int64, c_int64], c_void_p),
    "ggml_nbytes": ([c_void_p], c_size_t),
    "ggml_row_size": ([c_int, c_int64], c_size_t),
    "ggml_get_type_traits": ([c_int], c_void_p),
    "ggml_mul_mat_id": ([c_void_p] * 4, c_void_p),
    "ggml_swiglu_split": ([c_void_p] * 3, c_void_p),
    "ggml_mul": ([c_void_p] * 3, c_void_p),
    "ggml_add": ([c_void_p] * 3, c_void_p),
    "ggml_cont": ([c_void_p] * 2, c_void_p),
    "ggml_view_2d": ([c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t], c_void_p),
    "ggml_new_graph": ([c_void_p], c_void_p),
    "ggml_build_forward_expand": ([c_void_p] * 2, None),
    "ggml_quantize_chunk": (
        [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p],
        c_size_t,
    ),
    "ggml_backend_cpu_init": ([], c_void_p),
    "ggml_backend_cpu_set_n_threads": ([c_void_p, c_int], None),
    "ggml_backend_free": ([c_void_p], None),
    "ggml_backend_get_device": ([c_void_p], c_void_p),
    "ggml_backend_dev_backend_reg": ([c_void_p], c_void_p),
    "ggml_backend_reg_get_proc_address": ([c_void_p, c_char_p], c_void_p),
    "ggml_backend_get_default_buffer_type": ([c_void_p], c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": ([c_void_p] * 2, c_void_p),
    "ggml_backend_buffer_free": ([c_void_p], None),
    "ggml_backend_supports_op": ([c_void_p] * 2, c_bool),
    "ggml_backend_tensor_set": ([c_void_p, c_void_p, c_size_t, c_size_t], None),
    "ggml_backend_tensor_get": ([c_void_p, c_void_p, c_size_t, c_size_t], None),
    "ggml_backend_graph_compute": ([c_void_p] * 2, c_int),
}


def load_ggml() -> Any:
    """The functions above from the libraries of llama-cpp-python, without their prefix."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ImportError("llama-cpp-python is not installed")
    folder = Path(spec.origin).parent / "lib"
    # RTLD_GLOBAL: the second one resolves against the first.
    libraries = [
        ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
        for name in ("ggml-base", "ggml-cpu")
    ]
    found = SimpleNamespace()
    for name, (arguments, result) in _SIGNATURES.items():
        function = next(getattr(lib, name) for lib in libraries if hasattr(lib, name))
        function.argtypes, function.restype = arguments, result
        setattr(found, name.removeprefix("ggml_"), function)
    found.log_set(_silent, None)
    return found


def _context(ggml: Any, tensors: int) -> int:
    """A context that holds descriptions only; the data lies in backend buffers."""
    size = tensors * ggml.tensor_overhead() + ggml.graph_overhead()
    context: int = ggml.init(_InitParams(size, None, True))
    return context


def _buffer_types(ggml: Any, backend: int) -> list[int]:
    """Buffer types in llama.cpp's order of preference, the plain one last."""
    device = ggml.backend_get_device(backend)
    registry = ggml.backend_dev_backend_reg(device)
    address = ggml.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    found: list[int] = []
    if address:
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)(device)
        while extra[len(found)]:
            found.append(extra[len(found)])
    return [*found, ggml.backend_get_default_buffer_type(backend)]


class LlamaCppMoe:
    """Layers of random weights in one llama.cpp format.

    Args:
        hidden, intermediate, experts, top_k: the layer.
        ggml_type: a type of FORMATS.
        num_layers: layers, which take turns.

    Raises:
        ImportError: llama-cpp-python is not installed.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        ggml_type: int,
        num_layers: int,
    ) -> None:
        self._ggml = load_ggml()
        self._backend = self._ggml.backend_cpu_init()
        self._sizes, self._top_k, self._type = (hidden, intermediate, experts), top_k, ggml_type
        self._contexts: list[int] = []
        self._buffers: list[int] = []
        #: float32 [rows, columns] of gate, up and down, the same for every expert and layer.
        self.source = [
            torch.randn(rows, columns) * columns**-0.5
            for rows, columns in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        ]  # fmt: skip
        encoded = [self._quantise(weight) for weight in self.source]
        self._layers = [[self._weights(*e) for e in encoded] for _ in range(num_layers)]
        self._graphs: dict[int, list[_Graph]] = {}

    def _quantise(self, weight: Tensor) -> tuple[tuple[int, int], Tensor]:
        rows, columns = weight.shape
        out = torch.empty(rows * self._ggml.row_size(self._type, columns), dtype=torch.uint8)
        self._ggml.quantize_chunk(
            self._type, weight.data_ptr(), out.data_ptr(), 0, rows, columns, None
        )
        return (rows, columns), out

    def _weights(self, shape: tuple[int, int], encoded: Tensor) -> int:
        """A tensor of all experts in the first buffer type that has a kernel for it."""
        ggml, (rows, columns), experts = self._ggml, shape, self._sizes[2]
        for buffer_type in _buffer_types(ggml, self._backend):
            context = _context(ggml, 4)
            weight: int = ggml.new_tensor_3d(context, self._type, columns, rows, experts)
            buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
            x = ggml.new_tensor_3d(context, F32, columns, 1, 1)
            ids = ggml.new_tensor_2d(context, I32, self._top_k, 1)
            trial = ggml.mul_mat_id(context, weight, x, ids)
            if buffer and ggml.backend_supports_op(self._backend, trial):
                every = encoded.repeat(experts)
                ggml.backend_tensor_set(weight, every.data_ptr(), 0, every.numel())
                self._contexts.append(context)
                self._buffers.append(buffer)
                return weight
            if buffer:
                ggml.backend_buffer_free(buffer)
            ggml.free(context)
        raise RuntimeError(f"llama.cpp has no mul_mat_id for ggml_type {self._type}")

    def prepare(self, tokens: int) -> None:
        """Build the graphs for this number of tokens."""
        if tokens not in self._graphs:
            self._graphs[tokens] = [
                _Graph(self._ggml, self._backend, w, self._sizes[0], self._top_k, tokens)
                for w in self._layers
            ]

    def __call__(self, x: Tensor, gates: Tensor, ids: Tensor, turn: int) -> Tensor:
        """Routed output float32 [T, H] of float32 x [T, H], float32 gates and int32 ids [T, K], with
        torch's number of threads."""
        self.prepare(len(x))
        self._ggml.backend_cpu_set_n_threads(self._backend, torch.get_num_threads())
        return self._graphs[len(x)][turn % len(self._layers)].run(x, gates, ids)

    def close(self) -> None:
        """Free all memory outside Python."""
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.close()
        for buffer in self._buffers:
            self._ggml.backend_buffer_free(buffer)
        for context in self._contexts:
            self._ggml.free(context)
        self._ggml.backend_free(self._backend)
        self._graphs, self._buffers, self._contexts = {}, [], []


class _Graph:
    """The MoE layer for a fixed number of tokens."""

    def __init__(
        self, ggml: Any, backend: int, weights: list[int], hidden: int, top_k: int, tokens: int
    ) -> None:
        self._ggml, self._backend = ggml, backend
        context = self._context = _context(ggml, 16 + 2 * top_k)
        gate, up, down = weights
        self._x = ggml.new_tensor_3d(context, F32, hidden, 1, tokens)
        self._ids = ggml.new_tensor_2d(context, I32, top_k, tokens)
        self._gates = ggml.new_tensor_3d(context, F32, 1, top_k, tokens)
        activated = ggml.swiglu_split(
            context,
            ggml.mul_mat_id(context, gate, self._x, self._ids),
            ggml.mul_mat_id(context, up, self._x, self._ids),
        )
        experts = ggml.mul(
            context, ggml.mul_mat_id(context, down, activated, self._ids), self._gates
        )
        self._out = self._sum_slots(experts, hidden, top_k, tokens)
        self._graph = ggml.new_graph(context)
        ggml.build_forward_expand(self._graph, self._out)
        self._buffer = ggml.backend_alloc_ctx_tensors_from_buft(
            context, ggml.backend_get_default_buffer_type(backend)
        )
        self._result = torch.empty(tokens, hidden, dtype=torch.float32)

    def _sum_slots(self, experts: int, hidden: int, top_k: int, tokens: int) -> int:
        row = 4 * hidden
        slots = [
            self._ggml.view_2d(self._context, experts, hidden, tokens, top_k * row, slot * row)
            for slot in range(top_k)
        ]
        total: int = slots[0]
        for slot in slots[1:]:
            total = self._ggml.add(self._context, total, slot)
        return total if top_k > 1 else self._ggml.cont(self._context, total)

    def run(self, x: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
        for tensor, value in ((self._x, x), (self._gates, gates), (self._ids, ids)):
            self._ggml.backend_tensor_set(
                tensor, value.data_ptr(), 0, value.numel() * value.itemsize
            )
        if self._ggml.backend_graph_compute(self._backend, self._graph):
            raise RuntimeError("llama.cpp could not compute the layer")
        out = self._result
        self._ggml.backend_tensor_get(self._out, out.data_ptr(), 0, out.numel() * 4)
        return out

    def close(self) -> None:
        self._ggml.backend_buffer_free(self._buffer)
        self._ggml.free(self._context)
