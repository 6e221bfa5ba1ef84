# SPDX-License-Identifier: Apache-2.0
"""Ways to store expert weights, compared by what they do to the model: KL and perplexity against bytes.

    python -m vllm_dpa.benchmarks.encoders MODEL --calibration TEXT --text HELDOUT [--json]

The routed experts of MODEL are replaced by their decode at every k, everything else is float32. Codecs:

    greedy       one plane after the other, offset = mean, scale = mean |rest|, shared by all tiers
    rtn          round to nearest with k bits, own range per group and k: seven files, no prefix code
    anybcq       AnyBCQ (arXiv 2510.10467): alternating fit of two planes, then a plane at a time, with
                 scales of its own for every tier
    a, b, c      this project's stages A, B and B + C, in both layouts
    llama.cpp    its formats, with the importance of every column from the same calibration tokens; where
                 llama-cpp-python is installed. Rows that a K format's blocks do not divide fall back to
                 the format that llama.cpp takes instead, with the bytes of that.
"""

import argparse
import ctypes
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from vllm_dpa.errors import DpaError
from vllm_dpa.kernels.planes import (
    MIN_CHUNKS,
    NUM_CHUNKS,
    PER_CHUNK,
    expert_bytes,
    num_groups,
)
from vllm_dpa.profiling.calibration import Calibration, CalibrationOptions, read_documents
from vllm_dpa.profiling.codec import Codec, SharedScale
from vllm_dpa.profiling.fit.matrix import cut_groups
from vllm_dpa.profiling.fit.refine import refine
from vllm_dpa.profiling.fitters import damped_hessian
from vllm_dpa.profiling.layer_fit import EncodeOptions, LayerWeights, one_thread_each
from vllm_dpa.profiling.reference_model import ReferenceModel
from vllm_dpa.profiling.source import SourceCheckpoint
from vllm_dpa.settings import ScaleLayout

GROUP = 128
TIERS = range(MIN_CHUNKS, NUM_CHUNKS + 1)
# Rounds of AnyBCQ's alternating fit: at the start, and after every further plane.
START_ROUNDS, ROUNDS = 20, 10
CPU = torch.device("cpu")
LAYOUTS: tuple[ScaleLayout, ...] = get_args(ScaleLayout)


def sign(x: Tensor) -> Tensor:
    """+1 or -1, never 0: what a bit can hold."""
    return torch.where(x >= 0, 1.0, -1.0)


@dataclass(frozen=True)
class GroupCode:
    """Planes with scales per tier.

    Attributes:
        signs: float32 [n, GROUP, 8].
        scale: k -> float32 [n, k].
        offset: k -> float32 [n].
        shape: of the weight, [E, N, C].
    """

    signs: Tensor
    scale: dict[int, Tensor]
    offset: dict[int, Tensor]
    shape: torch.Size

    def decode(self, k: int) -> Tensor:
        values = self.offset[k][:, None] + (self.signs[..., :k] @ self.scale[k][..., None])[..., 0]
        return values.reshape(*self.shape[:2], -1)[..., : self.shape[2]]


class _Planes:
    """What the two research codecs on planes have in common."""

    def pack(self, weight: Tensor, code: GroupCode, row_blocks: int, hessian: Tensor | None) -> Any:
        return {"signs": code.signs.to(torch.int8), "scale": code.scale, "offset": code.offset}

    def decode(self, code: GroupCode, k: int) -> Tensor:
        return code.decode(k)

    def cost(self, rows: int, columns: int, k: int) -> int:
        """Read at tier k. AnyBCQ's other tiers' scales are stored, but not read."""
        return expert_bytes(rows, columns, k, GROUP, PER_CHUNK)


class Greedy(_Planes):
    """SharedScale taken literally: every plane is the sign of what the earlier ones left."""

    def fit(self, weight: Tensor, hessian: Tensor | None) -> GroupCode:
        groups, mask = cut_groups(weight, GROUP)
        count = mask.sum(1)
        offset = (groups * mask).sum(1) / count
        rest = (groups - offset[:, None]) * mask
        signs, scales = [], []
        for _ in range(NUM_CHUNKS):
            signs.append(sign(rest))
            scales.append(rest.abs().sum(1) / count)
            rest = (rest - scales[-1][:, None] * signs[-1]) * mask
        scale = torch.stack(scales, 1)
        return GroupCode(
            torch.stack(signs, 2),
            {k: scale[:, :k] for k in TIERS},
            dict.fromkeys(TIERS, offset),
            weight.shape,
        )


class AnyBcq(_Planes):
    """AnyBCQ without its gradient stage: scales of its own for every tier, planes frozen in turn."""

    def fit(self, weight: Tensor, hessian: Tensor | None) -> GroupCode:
        groups, mask = cut_groups(weight, GROUP)
        greedy = Greedy().fit(weight, None)
        signs = greedy.signs[..., :MIN_CHUNKS]
        for _ in range(START_ROUNDS):
            offset, scale = self._scales(groups, mask, signs)
            signs = self._nearest(groups, offset, scale)
        offset, scale = self._scales(groups, mask, signs)
        scales, offsets = {MIN_CHUNKS: scale}, {MIN_CHUNKS: offset}
        for k in range(MIN_CHUNKS + 1, NUM_CHUNKS + 1):
            plane = sign(groups - offset[:, None] - (signs @ scale[..., None])[..., 0])
            for _ in range(ROUNDS):
                both = torch.cat((signs, plane[..., None]), 2)
                offset, scale = self._scales(groups, mask, both)
                kept = (signs @ scale[:, :-1, None])[..., 0]
                plane = sign((groups - offset[:, None] - kept) * sign(scale[:, -1:]))
            signs = torch.cat((signs, plane[..., None]), 2)
            offset, scale = self._scales(groups, mask, signs)
            scales[k], offsets[k] = scale, offset
        return GroupCode(signs, scales, offsets, weight.shape)

    @staticmethod
    def _scales(groups: Tensor, mask: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
        basis = torch.nn.functional.pad(signs, (1, 0), value=1.0)
        weighted = (basis * mask[..., None]).transpose(1, 2)
        gram, right = (weighted @ basis).double(), (weighted @ groups[..., None]).double()
        gram += 1e-9 * GROUP * torch.eye(gram.shape[1], dtype=gram.dtype)
        solution = torch.linalg.solve(gram, right)[..., 0].float()
        return solution[:, 0], solution[:, 1:]

    @staticmethod
    def _nearest(groups: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
        words = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * scale.shape[1])
        values = offset[:, None] + scale @ words.T
        return words[(groups[..., None] - values[:, None]).abs().argmin(-1)]


class RoundToNearest:
    """An integer of k bits per weight between the group's smallest and largest value; no prefix code."""

    def fit(self, weight: Tensor, hessian: Tensor | None) -> Tensor:
        return weight

    def pack(self, weight: Tensor, code: Tensor, row_blocks: int, hessian: Tensor | None) -> Any:
        return {k: self.decode(code, k) for k in TIERS}

    def decode(self, code: Tensor, k: int) -> Tensor:
        groups, mask = cut_groups(code, GROUP)
        low = groups.masked_fill(mask == 0, torch.inf).amin(1, keepdim=True)
        high = groups.masked_fill(mask == 0, -torch.inf).amax(1, keepdim=True)
        step = ((high - low) / (2**k - 1)).clamp_min(1e-12)
        values = low + step * ((groups - low) / step).round()
        return values.reshape(*code.shape[:2], -1)[..., : code.shape[2]]

    def cost(self, rows: int, columns: int, k: int) -> int:
        return rows * (-(-columns * k // 8) + 4 * num_groups(columns, GROUP))


@dataclass(frozen=True)
class Expert:
    """One expert's matrices, calibration tokens with their weights, and Hessians."""

    matrices: tuple[Tensor, Tensor]
    x: Tensor
    token_weights: Tensor
    hessians: tuple[Tensor, Tensor]
    tier_weights: Tensor


# (w13, w2) at tier k, gains applied.
Decoder = Callable[[int], tuple[Tensor, Tensor]]


def plain(codec: Codec) -> Callable[[Expert], Decoder]:
    """An expert through a codec without gains."""

    def fit(expert: Expert) -> Decoder:
        codes = [codec.fit(m[None], None) for m in expert.matrices]
        return lambda k: (codec.decode(codes[0], k)[0], codec.decode(codes[1], k)[0])

    return fit


def ours(layout: ScaleLayout, stage: str) -> Callable[[Expert], Decoder]:
    """An expert through the stored format, fitted by stage ``a``, ``b`` or ``c``."""

    def fit(expert: Expert) -> Decoder:
        codec = SharedScale(EncodeOptions(scale_layout=layout), expert.tier_weights)
        hessians = [None, None] if stage == "a" else [h[None] for h in expert.hessians]
        codes = [codec.fit(m[None], h) for m, h in zip(expert.matrices, hessians, strict=True)]
        if stage == "c":
            codes = list(refine(expert.matrices, (codes[0], codes[1]), expert.x,
                                expert.token_weights**2, expert.tier_weights, layout, 0))  # fmt: skip
        gains = [
            codec.pack(m[None], code, 2 - i, h).gain[0]
            for i, (m, code, h) in enumerate(zip(expert.matrices, codes, hessians, strict=True))
        ]

        def decode(k: int) -> tuple[Tensor, Tensor]:
            w13, w2 = (codec.decode(code, k)[0] for code in codes)
            scaled = w13.unflatten(0, (2, -1)) * gains[0][:, k, None, None]
            return scaled.flatten(0, 1), w2 * gains[1][0, k]

        return decode

    return fit


# name -> (fit, bytes of a matrix at k).
CODECS: dict[str, tuple[Callable[[Expert], Decoder], Callable[[int, int, int], int]]] = {
    "greedy": (plain(Greedy()), Greedy().cost),
    "anybcq": (plain(AnyBcq()), AnyBcq().cost),
    "rtn": (plain(RoundToNearest()), RoundToNearest().cost),
    **{
        f"{stage} {layout}": (
            ours(layout, stage),
            SharedScale(EncodeOptions(scale_layout=layout), torch.zeros(9)).cost,
        )
        for layout in LAYOUTS
        for stage in ("a", "b", "c")
    },
}


class LlamaCpp:
    """llama.cpp's own quantisation functions, through ctypes."""

    # Name -> (ggml_type, weights per block, what a row of another length falls back to).
    FORMATS: ClassVar[dict[str, tuple[int, int, str | None]]] = {
        "Q2_K": (10, 256, "IQ4_NL"),
        "Q3_K": (11, 256, "IQ4_NL"),
        "Q4_K": (12, 256, "Q5_0"),
        "Q5_K": (13, 256, "Q5_1"),
        "Q6_K": (14, 256, "Q8_0"),
        "Q8_0": (8, 32, None),
        "Q5_0": (6, 32, None),
        "Q5_1": (7, 32, None),
        "IQ4_NL": (20, 32, None),
    }
    COMPARED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")

    def __init__(self) -> None:
        from vllm_dpa.benchmarks.llama_cpp_moe import load_ggml

        self._ggml = load_ggml()

    def _format(self, name: str, columns: int) -> tuple[int, int]:
        number, block, other = self.FORMATS[name]
        return (number, block) if columns % block == 0 else self._format(str(other), columns)

    def cost(self, name: str, rows: int, columns: int) -> int:
        return rows * int(self._ggml.row_size(self._format(name, columns)[0], columns))

    def matrix(self, name: str, weight: Tensor, importance: Tensor) -> Tensor:
        """Quantise and dequantise float32 [N, C]; ``importance`` float32 [C]."""
        number, _ = self._format(name, weight.shape[1])
        weight, importance = weight.contiguous(), importance.contiguous()
        data = torch.empty(self.cost(name, *weight.shape), dtype=torch.uint8)
        self._ggml.quantize_chunk(number, weight.data_ptr(), data.data_ptr(), 0, *weight.shape,
                                  importance.data_ptr())  # fmt: skip
        out = torch.empty_like(weight)
        # ggml_type_traits: name, two block sizes, type size, a bool, then to_float.
        field = int(self._ggml.get_type_traits(number)) + 40
        to_float = ctypes.c_size_t.from_address(field).value
        convert = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        convert(to_float)(data.data_ptr(), out.data_ptr(), weight.numel())
        return out

    def fit(self, name: str) -> Callable[[Expert], Decoder]:
        def fit(expert: Expert) -> Decoder:
            w13, w2 = (
                self.matrix(name, m, h.diagonal())
                for m, h in zip(expert.matrices, expert.hessians, strict=True)
            )
            return lambda k: (w13, w2)

        return fit


class Bench:
    """A model, its calibration tokens and the texts to compare on."""

    def __init__(self, path: Path, calibration: str, texts: list[Path], tokens: int) -> None:
        self.source = SourceCheckpoint(path)
        self.reference = ReferenceModel.load(path)
        self._calibration = Calibration(
            self.source, read_documents(calibration), CalibrationOptions(), CPU
        )
        self.windows = [self.reference.windows(text, 256, tokens) for text in texts]
        self._exact = [self._log_probs(windows) for windows in self.windows]
        self._modules: list[Any] = [
            self.reference.experts_module(layer) for layer in self.source.layers
        ]
        self._saved = [
            (m.gate_up_proj.detach().clone(), m.down_proj.detach().clone()) for m in self._modules
        ]

    def _log_probs(self, windows: Tensor) -> list[Tensor]:
        return [self.reference.logits(batch).log_softmax(-1) for batch in windows.split(4)]

    def fit(
        self, methods: dict[str, Callable[[Expert], Decoder]]
    ) -> dict[str, list[list[Decoder]]]:
        """Every method on every expert: name -> layers -> experts."""
        out: dict[str, list[list[Decoder]]] = {name: [] for name in methods}
        for layer in self.source.layers:
            print(layer.prefix, file=sys.stderr, flush=True)
            inputs = self._calibration.inputs(layer.prefix)
            weights = LayerWeights.of_source(self.source, layer)
            tier_weights = weights.tier_weights(EncodeOptions())

            def fit_all(e: int) -> list[Decoder]:
                matrices = weights.expert(e)  # noqa: B023 (used within the loop)
                x, w = inputs.of_expert(e)  # noqa: B023
                gate, up = linear(x, matrices[0]).chunk(2, dim=-1)
                hessians = damped_hessian(x, w), damped_hessian(silu(gate) * up, w)
                expert = Expert(matrices, x, w, hessians, tier_weights)  # noqa: B023
                return [fit(expert) for fit in methods.values()]

            with one_thread_each(CPU) as run:
                fitted = list(run(fit_all, range(layer.num_experts)))
            for i, name in enumerate(methods):
                out[name].append([decoders[i] for decoders in fitted])
        return out

    @torch.inference_mode()
    def quality(self, experts: list[list[Decoder]], k: int) -> list[tuple[float, float]]:
        """(KL in nats, perplexity) on every text with all experts at tier k."""
        for module, layer in zip(self._modules, experts, strict=True):
            for e, decode in enumerate(layer):
                module.gate_up_proj.data[e], module.down_proj.data[e] = decode(k)
        out = []
        for windows, exact in zip(self.windows, self._exact, strict=True):
            kl = nll = 0.0
            for batch, truth in zip(windows.split(4), exact, strict=True):
                ours = self.reference.logits(batch).log_softmax(-1)
                kl += float((truth.exp() * (truth - ours)).sum())
                nll -= float(ours[:, :-1].gather(-1, batch[:, 1:, None]).sum())
            predicted = windows.shape[0] * (windows.shape[1] - 1)
            out.append((kl / windows.numel(), math.exp(nll / predicted)))
        for module, (gate_up, down) in zip(self._modules, self._saved, strict=True):
            module.gate_up_proj.data.copy_(gate_up)
            module.down_proj.data.copy_(down)
        return out

    def bits(self, cost: Callable[[int, int], int]) -> float:
        """Bits per expert weight."""
        size = weights = 0
        for layer in self.source.layers:
            for rows, columns, _ in layer.matrices().values():
                size += layer.num_experts * cost(rows, columns)
            weights += layer.num_weights
        return 8 * size / weights


def compare(bench: Bench, names: list[str], llama: LlamaCpp | None) -> list[dict[str, Any]]:
    """Rows of codec, k, bits per weight, KL and perplexity per text."""
    methods = {name: CODECS[name][0] for name in names}
    formats = LlamaCpp.COMPARED if llama else ()
    fitted = bench.fit(methods | {name: llama.fit(name) for name in formats if llama})
    rows = []
    for name in names:
        for k in TIERS:
            cost = partial(_cost_at, CODECS[name][1], k)
            rows.append(_row(name, k, bench.bits(cost), bench.quality(fitted[name], k)))
    for name in formats:
        assert llama is not None
        bits = bench.bits(partial(llama.cost, name))
        rows.append(_row(f"llama.cpp {name}", 0, bits, bench.quality(fitted[name], 0)))
    return rows


def _cost_at(cost: Callable[[int, int, int], int], k: int, rows: int, columns: int) -> int:
    return cost(rows, columns, k)


def _row(name: str, k: int, bits: float, quality: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "codec": name,
        "k": k,
        "bits_per_weight": bits,
        "kl": [kl for kl, _ in quality],
        "perplexity": [perplexity for _, perplexity in quality],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--codecs", default=",".join(CODECS), help="comma-separated")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.codecs.split(",")
    unknown = [name for name in names if name not in CODECS]
    if unknown:
        parser.error(f"unknown codec {unknown[0]}; there are {', '.join(CODECS)}")
    try:
        llama = LlamaCpp()
    except ImportError as error:
        print(f"no llama.cpp formats: {error}", file=sys.stderr)
        llama = None
    try:
        bench = Bench(arguments.model, arguments.calibration, arguments.text, arguments.tokens)
    except DpaError as error:
        parser.error(str(error))
    rows = compare(bench, names, llama)
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        pairs = "  ".join(
            f"{kl:.5f} {ppl:.3f}" for kl, ppl in zip(row["kl"], row["perplexity"], strict=True)
        )
        print(f"{row['codec']:18s} {row['k'] or '':>2} {row['bits_per_weight']:6.3f}  {pairs}")


if __name__ == "__main__":
    main()
