# SPDX-License-Identifier: Apache-2.0
"""The CPU MoE kernel against vLLM's bf16 one and llama.cpp's, one layer at a time, weights from DRAM.

    python benchmarks/cpu_moe.py --tokens 1,4 --k 2,4,8      (or: vllm-dpa bench cpu)

Every repetition times all kernels one after the other on fresh random routing, and the ratio of a row
is the median over these pairs. llama.cpp takes part where llama-cpp-python is installed, with the format
of about the same bytes per weight. The layers take turns, so that no weights are left in a cache. The
roof is the read bandwidth of the same threads, measured in the same run.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from vllm_dpa.benchmarks import llama_cpp_moe
from vllm_dpa.benchmarks.llama_cpp_moe import LlamaCppMoe
from vllm_dpa.checkpoint import LayerShape
from vllm_dpa.kernels.budget import Budget
from vllm_dpa.kernels.cpu import native
from vllm_dpa.kernels.cpu.fused_moe import fused_moe
from vllm_dpa.kernels.cpu.packed import MatrixShape, PackedLayer, PackedMatrix, zeros
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_CHUNKS, SCALE_LAYOUTS, num_groups, plane_bytes
from vllm_dpa.settings import CheckpointSettings

GROUP_SIZE = 128
NUM_LAYERS = 2
ROOF_BYTES = 2**30


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    experts: int
    top_k: int


SHAPES = {
    "olmoe": Shape(2048, 1024, 64, 8),
    "qwen3-30b": Shape(2048, 768, 128, 8),
    # Every token goes to every expert: tokens per expert = tokens, to find where the tile overtakes.
    "all-experts": Shape(2048, 1024, 4, 4),
}


@dataclass(frozen=True)
class Options:
    """What to measure; ``pairs`` repetitions of each row, at least 10 for a number worth keeping."""

    shapes: tuple[str, ...] = ("olmoe",)
    layouts: tuple[str, ...] = SCALE_LAYOUTS
    isas: tuple[str, ...] = ()
    threads: tuple[int, ...] = (1,)
    tokens: tuple[int, ...] = (1, 4, 16, 128)
    k: tuple[int, ...] = (2, 4, 8)
    activations: str = "int8"
    path: str = "auto"
    pairs: int = 10


@dataclass(frozen=True)
class Row:
    """``ms``: median of our kernel. ``ratio_*``: their time over ours; vLLM's kernel without AMX, and
    with it where the processor has it. ``mixed_over_uniform``: time of a dispatch whose experts differ
    in k, over that of a uniform one with as many chunks in all. ``allocator_share``: time of the
    allocator's native code, in a dispatch's wake, over ``ms``. ``gb_per_s``: bytes of the experts in
    use at tier k, over ``ms``; ``roof_share``: that over the measured read bandwidth."""

    shape: str
    layout: str
    isa: str
    threads: int
    tokens: int
    k: int
    ms: float
    ratio_vllm_bf16: float | None
    ratio_vllm_bf16_amx: float | None
    ratio_llama_cpp: float | None
    llama_cpp_format: str | None
    mixed_over_uniform: float | None
    allocator_share: float
    gb_per_s: float
    roof_share: float


def random_layer(shape: Shape, layout: str, isa: str, generator: torch.Generator) -> PackedLayer:
    """A layer of random bits with scales that halve per plane."""

    def matrix(rows: int, columns: int, gated: bool) -> PackedMatrix:
        packed = PackedMatrix(
            MatrixShape(shape.experts, rows, columns, GROUP_SIZE, layout, gated), NUM_CHUNKS, isa
        )
        side = (shape.experts, rows, num_groups(columns, GROUP_SIZE))
        scales = [torch.full(side, columns**-0.5 * 2.0**-j).half() for j in range(NUM_CHUNKS)]
        packed.put_sides(torch.zeros(side).half(), scales[0], torch.ones_like(packed.gain))
        size = (shape.experts, rows, plane_bytes(columns))
        for j, scale in enumerate(scales):
            bits = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
            packed.put(j, bits, scale)
        return packed

    return PackedLayer(
        matrix(2 * shape.intermediate, shape.hidden, True),
        matrix(shape.hidden, shape.intermediate, False),
    )


class VllmBf16:
    """vLLM's ``cpu_fused_moe`` in bf16, on layers of its own.

    Args:
        shape: of the layers.
        isa: vLLM's name of the instruction set: ``vec``, or ``amx`` where the processor has it.

    Raises:
        ImportError: vLLM is not installed.
    """

    def __init__(self, shape: Shape, isa: str) -> None:
        import vllm._custom_ops as ops

        def weights(*size: int) -> Tensor:
            # Random low bits under one exponent: small finite numbers, made quickly.
            value = torch.empty(size, dtype=torch.bfloat16)
            value.view(torch.int16).random_(0, 256).bitwise_or_(0x3C00)
            return ops.cpu_prepack_moe_weight(value, isa)

        self._run, self._isa = ops.cpu_fused_moe, isa
        up = (shape.experts, 2 * shape.intermediate, shape.hidden)
        down = (shape.experts, shape.hidden, shape.intermediate)
        self._layers = [(weights(*up), weights(*down)) for _ in range(NUM_LAYERS)]

    def __call__(self, x: Tensor, gates: Tensor, ids: Tensor, turn: int) -> None:
        w13, w2 = self._layers[turn % NUM_LAYERS]
        self._run(torch.empty_like(x), x, w13, w2, None, None, gates, ids, "silu", self._isa)


def load_vllm(shape: Shape) -> dict[str, VllmBf16]:
    """vLLM's kernels for this processor by instruction set; none where vLLM is not installed."""
    isas = ["vec", "amx"] if "amx" in native.available_isas() else ["vec"]
    try:
        return {isa: VllmBf16(shape, isa) for isa in isas}
    except ImportError:
        return {}


def load_llama_cpp(shape: Shape, tiers: tuple[int, ...]) -> dict[int, LlamaCppMoe]:
    """By tier, in the formats that fit the shape; empty where llama-cpp-python is not installed."""
    sizes = (shape.hidden, shape.intermediate, shape.experts, shape.top_k)
    formats = {
        k: f.ggml_type
        for k, f in llama_cpp_moe.FORMATS.items()
        if k in tiers and shape.hidden % f.block == 0 and shape.intermediate % f.block == 0
    }
    try:
        return {k: LlamaCppMoe(*sizes, f, NUM_LAYERS) for k, f in formats.items()}
    except ImportError:
        return {}


def read_bandwidth() -> float:
    """Bytes per second that the present number of threads reads from DRAM, median of 7."""
    memory = zeros((1, ROOF_BYTES)).fill_(1)  # on huge pages, as the experts are
    read = native.library().read_stream
    return ROOF_BYTES / median(
        seconds(lambda: read(memory.data_ptr(), ROOF_BYTES // 8)) for _ in range(7)
    )


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def route(shape: Shape, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(gates, ids) of random distinct experts, int32 ids as vLLM's router makes them."""
    ids = torch.rand(tokens, shape.experts, generator=generator).argsort(1)[:, : shape.top_k]
    return torch.full((tokens, shape.top_k), 1 / shape.top_k), ids.int().contiguous()


def bytes_of(shape: Shape, layout: str, k: int) -> int:
    """Bytes of one expert at tier k."""
    layer = LayerShape(
        prefix="layer",
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
    )
    settings = {"group_size": GROUP_SIZE, "scale_layout": layout}
    return layer.expert_bytes(k, CheckpointSettings.model_validate(settings))


def measure(options: Options, report: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """All rows; ``report`` sees each as it is done. Leaves torch's number of threads as it was."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    try:
        for name in options.shapes:
            vllm = load_vllm(SHAPES[name])
            llama_cpp = load_llama_cpp(SHAPES[name], options.k)
            for isa in options.isas or (native.active_isa(),):
                for layout in options.layouts:
                    layers = [
                        random_layer(SHAPES[name], layout, isa, generator)
                        for _ in range(NUM_LAYERS)
                    ]
                    for threads in options.threads:
                        torch.set_num_threads(threads)
                        roof = read_bandwidth()
                        for tokens in options.tokens:
                            race = Race(name, layers, vllm, llama_cpp, tokens, options, generator)
                            for row in race.rows(options.pairs, roof):
                                report(row)
                                rows.append(row)
            for layer in llama_cpp.values():
                layer.close()
    finally:
        torch.set_num_threads(before)
    return rows


class Race:
    """Everything that is timed for one number of tokens; all of it takes turns."""

    def __init__(
        self,
        name: str,
        layers: list[PackedLayer],
        vllm: dict[str, VllmBf16],
        llama_cpp: dict[int, LlamaCppMoe],
        tokens: int,
        options: Options,
        generator: torch.Generator,
    ) -> None:
        self._name, self._shape, self._layers = name, SHAPES[name], layers
        self._options, self._generator, self._tokens = options, generator, tokens
        self._x = torch.randn(tokens, self._shape.hidden, generator=generator).bfloat16()
        table = torch.rand(self._shape.experts, NUM_CHUNKS + 1, generator=generator)
        table = table.cumsum(1).flip(1)
        self._turn = 0
        self._bytes: dict[int, list[int]] = {k: [] for k in options.k}
        self._runners: dict[tuple[str, int], Callable[[Tensor, Tensor], float]] = {}
        for vllm_isa, layer in vllm.items():
            self._runners[f"vllm {vllm_isa}", 0] = partial(self._theirs, layer, self._x)
        for k in options.k:
            if k in llama_cpp:
                llama_cpp[k].prepare(tokens)
                self._runners["llama_cpp", k] = partial(self._theirs, llama_cpp[k], self._x.float())
            self._runners["ours", k] = partial(self._ours, k)
            if mixed_step(k):
                self._runners["mixed", k] = partial(self._mixed, k)
            self._runners["allocator", k] = partial(
                self._allocator, Budget(table, torch.tensor([float(k)]), per_token=False)
            )

    def rows(self, pairs: int, roof: float) -> list[Row]:
        """One row per k."""
        times: dict[tuple[str, int], list[float]] = {key: [] for key in self._runners}
        for repetition in range(pairs + 1):
            if repetition == 1:  # the first one warms up
                times = {key: [] for key in self._runners}
                self._bytes = {k: [] for k in self._options.k}
            for key, runner in self._runners.items():
                times[key].append(runner(*route(self._shape, self._tokens, self._generator)))
        return [self._row(k, times, roof) for k in self._options.k]

    def _row(self, k: int, times: dict[tuple[str, int], list[float]], roof: float) -> Row:
        ours = times["ours", k]

        def over_ours(name: str, tier: int) -> float | None:
            if (name, tier) not in times:
                return None
            return median(t / o for t, o in zip(times[name, tier], ours, strict=True))

        bandwidth = median(self._bytes[k]) / median(ours)
        llama_cpp = over_ours("llama_cpp", k)
        return Row(
            shape=self._name,
            layout=self._layers[0].w13.shape.scale_layout,
            isa=self._layers[0].isa,
            threads=torch.get_num_threads(),
            tokens=self._tokens,
            k=k,
            ms=1e3 * median(ours),
            ratio_vllm_bf16=over_ours("vllm vec", 0),
            ratio_vllm_bf16_amx=over_ours("vllm amx", 0),
            ratio_llama_cpp=llama_cpp,
            llama_cpp_format=None if llama_cpp is None else llama_cpp_moe.FORMATS[k].name,
            mixed_over_uniform=over_ours("mixed", k),
            allocator_share=median(times["allocator", k]) / median(ours),
            gb_per_s=bandwidth / 1e9,
            roof_share=bandwidth / roof,
        )

    def _theirs(
        self, layer: VllmBf16 | LlamaCppMoe, x: Tensor, gates: Tensor, ids: Tensor
    ) -> float:
        self._turn += 1
        return seconds(lambda: layer(x, gates, ids, self._turn))

    def _ours(self, k: int, gates: Tensor, ids: Tensor) -> float:
        self._bytes[k].append(
            len(ids.unique()) * bytes_of(self._shape, self._layers[0].w13.shape.scale_layout, k)
        )
        return self._dispatch(gates, ids, torch.full((self._shape.experts,), k))

    def _mixed(self, k: int, gates: Tensor, ids: Tensor) -> float:
        """The active experts at k - step and k + step in turn, an odd last one at k."""
        active, step = ids.unique().long(), mixed_step(k)
        active = active[torch.randperm(len(active), generator=self._generator)]
        counts = torch.full((self._shape.experts,), k)
        pairs = len(active) // 2
        counts[active[:pairs]] -= step
        counts[active[pairs : 2 * pairs]] += step
        return self._dispatch(gates, ids, counts)

    def _dispatch(self, gates: Tensor, ids: Tensor, counts: Tensor) -> float:
        self._turn += 1
        layer = self._layers[self._turn % len(self._layers)]
        call = (self._x, layer, gates, ids, counts, self._options.activations, self._options.path)
        return seconds(lambda: fused_moe(*call))

    def _allocator(self, budget: Budget, gates: Tensor, ids: Tensor) -> float:
        """Of the native call without what any native call costs, as it is part of fused_moe's."""
        counts = torch.empty(self._shape.experts, dtype=torch.int64)
        address, library = ctypes.addressof(native.native_budget(budget)), native.library()
        routing = (gates.data_ptr(), ids.data_ptr(), ids.itemsize, *ids.shape, counts.data_ptr())
        empty = seconds(lambda: library.find_isa(b"avx2"))
        return seconds(lambda: library.allocate(address, *routing)) - empty


def mixed_step(k: int) -> int:
    """How far a mixed dispatch of mean k goes up and down; 0 where it cannot."""
    return max(0, min(2, k - MIN_CHUNKS, NUM_CHUNKS - k))


def format_row(row: Row) -> str:
    """One line of the table that :func:`run` prints."""
    parts = [
        f"{row.shape:10} {row.layout:10} {row.isa:8} {row.threads:2} threads  M={row.tokens:<4} "
        f"k={row.k}  {row.ms:8.2f} ms  {row.gb_per_s:5.1f} GB/s  {row.roof_share:4.0%} of roof"
    ]
    if row.ratio_vllm_bf16 is not None:
        parts.append(f"{row.ratio_vllm_bf16:5.2f}x vLLM bf16")
    if row.ratio_vllm_bf16_amx is not None:
        parts.append(f"{row.ratio_vllm_bf16_amx:5.2f}x with AMX")
    if row.ratio_llama_cpp is not None:
        parts.append(f"{row.ratio_llama_cpp:5.2f}x {row.llama_cpp_format}")
    if row.mixed_over_uniform is not None:
        parts.append(f"mixed k {row.mixed_over_uniform:4.2f}")
    parts.append(f"allocator {row.allocator_share:4.1%}")
    return "  ".join(parts)


def run(options: Options, as_json: bool) -> None:
    """Measure, and print rows as they come or one JSON object."""
    if as_json:
        rows = [asdict(row) for row in measure(options)]
        print(json.dumps({"rows": rows}, indent=1))
    else:
        measure(options, lambda row: print(format_row(row), flush=True))


if __name__ == "__main__":
    from vllm_dpa.cli import app

    app(["bench", "cpu", *sys.argv[1:]])
