# SPDX-License-Identifier: Apache-2.0
"""The CPU MoE kernel against vLLM's bf16 one, one layer at a time, weights from DRAM.

    python benchmarks/cpu_moe.py --tokens 1,4 --k 2,4,8      (or: vllm-dpa bench cpu)

Every repetition times both kernels one after the other on fresh random routing, and the ratio of a row
is the median over these pairs. The layers take turns, so that no weights are left in a cache. The roof
is the read bandwidth of the same threads, measured in the same run.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor

from vllm_dpa.checkpoint import LayerShape
from vllm_dpa.kernels.cpu import native
from vllm_dpa.kernels.cpu.fused_moe import fused_moe
from vllm_dpa.kernels.cpu.packed import MatrixShape, PackedLayer, PackedMatrix, zeros
from vllm_dpa.kernels.planes import NUM_CHUNKS, SCALE_LAYOUTS, num_groups, plane_bytes
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
    """``ms``: median of our kernel. ``ratio_*``: their time over ours. ``gb_per_s``: bytes of the
    experts in use at tier k, over ``ms``; ``roof_share``: that over the measured read bandwidth."""

    shape: str
    layout: str
    isa: str
    threads: int
    tokens: int
    k: int
    ms: float
    ratio_vllm_bf16: float | None
    ratio_llama_cpp: float | None
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
    """vLLM's ``cpu_fused_moe`` in bf16 without AMX, on layers of its own.

    Raises:
        ImportError: vLLM is not installed.
    """

    def __init__(self, shape: Shape) -> None:
        import vllm._custom_ops as ops

        def weights(*size: int) -> Tensor:
            # Random low bits under one exponent: small finite numbers, made quickly.
            value = torch.empty(size, dtype=torch.bfloat16)
            value.view(torch.int16).random_(0, 256).bitwise_or_(0x3C00)
            return ops.cpu_prepack_moe_weight(value, "vec")

        self._run = ops.cpu_fused_moe
        up = (shape.experts, 2 * shape.intermediate, shape.hidden)
        down = (shape.experts, shape.hidden, shape.intermediate)
        self._layers = [(weights(*up), weights(*down)) for _ in range(NUM_LAYERS)]

    def __call__(self, x: Tensor, gates: Tensor, ids: Tensor, turn: int) -> None:
        w13, w2 = self._layers[turn % NUM_LAYERS]
        self._run(torch.empty_like(x), x, w13, w2, None, None, gates, ids, "silu", "vec")


def load_vllm(shape: Shape) -> VllmBf16 | None:
    """The baseline, or None where vLLM is not installed."""
    try:
        return VllmBf16(shape)
    except ImportError:
        return None


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
            baseline = load_vllm(SHAPES[name])
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
                            found = _rows(name, layers, baseline, tokens, roof, options, generator)
                            for row in found:
                                report(row)
                            rows += found
    finally:
        torch.set_num_threads(before)
    return rows


def _rows(
    name: str,
    layers: list[PackedLayer],
    baseline: VllmBf16 | None,
    tokens: int,
    roof: float,
    options: Options,
    generator: torch.Generator,
) -> list[Row]:
    """One row per k; all of them and the baseline take turns."""
    shape = SHAPES[name]
    layout = layers[0].w13.shape.scale_layout
    x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    ours: dict[int, list[float]] = {k: [] for k in options.k}
    bytes_read: dict[int, list[int]] = {k: [] for k in options.k}
    theirs: list[float] = []
    turn = 0
    for repetition in range(options.pairs + 1):  # the first one warms up
        gates, ids = route(shape, tokens, generator)
        if baseline is not None:
            theirs.append(seconds(lambda: baseline(x, gates, ids, repetition)))  # noqa: B023
        for k in options.k:
            gates, ids = route(shape, tokens, generator)
            counts = torch.full((shape.experts,), k)
            layer = layers[turn % len(layers)]
            turn += 1
            call = (x, layer, gates, ids, counts, options.activations, options.path)
            ours[k].append(seconds(lambda: fused_moe(*call)))  # noqa: B023
            bytes_read[k].append(len(ids.unique()) * bytes_of(shape, layout, k))
        if repetition == 0:
            theirs.clear()
            for k in options.k:
                ours[k].clear()
                bytes_read[k].clear()
    return [
        Row(
            shape=name,
            layout=layout,
            isa=layers[0].isa,
            threads=torch.get_num_threads(),
            tokens=tokens,
            k=k,
            ms=1e3 * median(ours[k]),
            ratio_vllm_bf16=median(t / o for t, o in zip(theirs, ours[k], strict=True))
            if theirs
            else None,
            ratio_llama_cpp=None,
            gb_per_s=median(bytes_read[k]) / median(ours[k]) / 1e9,
            roof_share=median(bytes_read[k]) / median(ours[k]) / roof,
        )
        for k in options.k
    ]


def format_row(row: Row) -> str:
    """One line of the table that :func:`run` prints."""
    ratio = "   -" if row.ratio_vllm_bf16 is None else f"{row.ratio_vllm_bf16:5.2f}x"
    return (
        f"{row.shape:10} {row.layout:10} {row.isa:8} {row.threads:2} threads  M={row.tokens:<4} "
        f"k={row.k}  {row.ms:8.2f} ms  {ratio} vLLM bf16  {row.gb_per_s:5.1f} GB/s  "
        f"{100 * row.roof_share:3.0f} % of roof"
    )


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
