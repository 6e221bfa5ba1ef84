# SPDX-License-Identifier: Apache-2.0
"""What an encode will take: bytes, memory and time, before it starts.

Sizes follow from the shapes, time from fitting a few random experts of the same shape on this machine.
A model need not be downloaded: its config.json is enough.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_dpa.checkpoint import CONFIG, LayerShape, read_json
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_CHUNKS
from vllm_dpa.profiling.calibration import LayerInputs, calibration_bytes
from vllm_dpa.profiling.families import layers_of_config
from vllm_dpa.profiling.fitters import StageA, StageB
from vllm_dpa.profiling.layer_fit import EncodeOptions, LayerFitter, LayerWeights
from vllm_dpa.profiling.source import SourceCheckpoint
from vllm_dpa.settings import CheckpointSettings

# The interpreter with torch and transformers, measured.
BASE_BYTES = 600 * 2**20
# Side of the square matrices whose product gives the speed of the calibration run.
GEMM = 1024


@dataclass(frozen=True)
class Plan:
    """Attributes:
    layers, experts, weights: what is encoded.
    output_bytes: k -> bytes of all experts' first k chunks.
    rest_bytes: everything else, copied; None where only config.json is there.
    disk_bytes: free space needed, finished layers and the chunk being joined included.
    memory_bytes: peak, of one process.
    weights_per_second: fitted, measured, all threads together.
    fit_seconds: of all layers in one process.
    calibration_seconds: of running the model on the calibration text; an estimate from its active
        parameters and the speed of a matrix product.
    """

    layers: int
    experts: int
    weights: int
    output_bytes: dict[int, int]
    rest_bytes: int | None
    disk_bytes: int
    memory_bytes: int
    threads: int
    weights_per_second: float
    fit_seconds: float
    calibration_seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SampleCalibration:
    """Random inputs, as many per expert as the calibration text gives on average."""

    tokens: int
    shape: LayerShape
    top_k: int

    def inputs(self, prefix: str) -> LayerInputs:
        """As many tokens as one expert sees, all of them routed to each of the experts."""
        share = max(1, self.tokens * self.top_k // self.shape.num_experts)
        ids = torch.arange(self.shape.num_experts).expand(share, -1)
        hidden = torch.randn(share, self.shape.hidden_size)
        return LayerInputs(hidden, ids, torch.ones(ids.shape), self.shape.num_experts)

    def identity(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def working_bytes(self, shape: LayerShape) -> int:
        return calibration_bytes(self.tokens, {"num_experts_per_tok": self.top_k}, shape)


def random_weights(shape: LayerShape) -> LayerWeights:
    """Gaussian experts of a layer's shape."""
    hidden, intermediate = shape.hidden_size, shape.intermediate_size

    def expert(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return (
            torch.randn(2 * intermediate, hidden, generator=generator) * hidden**-0.5,
            torch.randn(hidden, intermediate, generator=generator) * intermediate**-0.5,
        )

    return LayerWeights(shape, expert, "random weights")


def make_plan(
    model: Path, options: EncodeOptions, calibration_tokens: int | None, device: torch.device
) -> Plan:
    """Plan an encode.

    Args:
        model: folder of a model, or of its config.json alone.
        options: dials of the encoder.
        calibration_tokens: tokens of the calibration text; None for stage A.
        device: where it will compute.

    Raises:
        DpaError: no config.json, or a family that is not supported.
    """
    config = read_json(Path(model) / CONFIG, "a model folder has a config.json")
    has_weights = any(Path(model).glob("*.safetensors"))
    source = SourceCheckpoint(model) if has_weights else None
    layers = source.layers if source else layers_of_config(config, str(model))
    settings = CheckpointSettings(group_size=options.group_size, scale_layout=options.scale_layout)
    sizes = {
        k: sum(layer.num_experts * layer.expert_bytes(k, settings) for layer in layers)
        for k in range(1, NUM_CHUNKS + 1)
    }
    rest = source.rest_bytes() if source else None
    largest = max(layers, key=lambda layer: layer.num_weights)
    top_k = int(config.get("num_experts_per_tok", 1))
    fitter: LayerFitter = StageA(device)
    if calibration_tokens is not None:
        fitter = StageB(SampleCalibration(calibration_tokens, largest, top_k), device)
    speed = _measure(fitter, largest, options, calibration_tokens, top_k)
    weights = sum(layer.num_weights for layer in layers)
    planes = 2 * largest.num_experts * largest.expert_bytes(NUM_CHUNKS, settings)
    return Plan(
        layers=len(layers),
        experts=sum(layer.num_experts for layer in layers),
        weights=weights,
        output_bytes={k: size for k, size in sizes.items() if k >= MIN_CHUNKS},
        rest_bytes=rest,
        disk_bytes=sizes[NUM_CHUNKS] + sizes[1] + (rest or 0),
        memory_bytes=BASE_BYTES + planes + fitter.working_bytes(largest, options),
        threads=torch.get_num_threads(),
        weights_per_second=speed,
        fit_seconds=weights / speed,
        calibration_seconds=_calibration_seconds(layers, top_k, calibration_tokens or 0, device),
    )


def _measure(
    fitter: LayerFitter,
    shape: LayerShape,
    options: EncodeOptions,
    tokens: int | None,
    top_k: int,
) -> float:
    """Weights per second of fitting a layer of as many random experts as there are threads."""
    experts = torch.get_num_threads()
    small = shape.model_copy(update={"num_experts": experts})
    if tokens is not None:
        per_expert = tokens * top_k // shape.num_experts
        fitter = StageB(SampleCalibration(per_expert, small, experts), fitter.device)
    weights = random_weights(small)
    start = time.perf_counter()
    fitter.fit(weights, options, lambda _: None)
    return small.num_weights / (time.perf_counter() - start)


def _calibration_seconds(
    layers: list[LayerShape], top_k: int, tokens: int, device: torch.device
) -> float:
    """Two operations per active weight and token; attention taken as 4 hidden x hidden matrices."""
    active = sum(
        top_k * layer.num_weights // layer.num_experts + 4 * layer.hidden_size**2
        for layer in layers
    )
    if not tokens:
        return 0.0
    a = torch.randn(GEMM, GEMM, device=device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        (a @ a).sum().item()
        times.append(time.perf_counter() - start)
    return 2 * active * tokens * min(times) / (2 * GEMM**3)
