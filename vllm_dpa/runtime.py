# SPDX-License-Identifier: Apache-2.0
"""State of one worker process: the options, the budget, and its MoE layers by name."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vllm_dpa.allocation import LayerCost, budget_of
from vllm_dpa.checkpoint import CheckpointReader, LayerShape, Residuals
from vllm_dpa.kernels.budget import Budget
from vllm_dpa.kernels.cpu import native
from vllm_dpa.kernels.cpu.packed import PackedLayer
from vllm_dpa.settings import Mode, RuntimeOptions

logger = logging.getLogger("vllm.vllm_dpa")


@dataclass(frozen=True)
class LayerState:
    """What ``apply`` needs of one layer."""

    experts: PackedLayer
    budget: Budget


@dataclass
class WorkerState:
    """One loaded model.

    Attributes:
        reader: its checkpoint.
        options: run-time options.
        mode: the allocator mode in force; ``gate_only`` where ``dpa`` was asked for without a
            residual table.
        residuals: the residual table, if the checkpoint has one.
        path: the kernel's method: ``lut`` where outputs must not depend on the batch, else ``auto``.
        k_bar: float32 [1], the budget; written between steps, read by every dispatch.
        layers: by vLLM layer name.
    """

    reader: CheckpointReader
    options: RuntimeOptions
    mode: Mode
    residuals: Residuals | None
    k_bar: Tensor
    path: str = "auto"
    layers: dict[str, LayerState] = field(default_factory=dict)

    @classmethod
    def open(
        cls, model: Path, options: RuntimeOptions, batch_invariant: bool = False
    ) -> "WorkerState":
        """Open and verify a checkpoint; log what will be served.

        Raises:
            DpaError: see :class:`vllm_dpa.checkpoint.CheckpointReader`.
        """
        reader = CheckpointReader(model, options.max_chunks)
        if options.verify_hashes:
            reader.verify_hashes()
        residuals, mode = reader.residuals(), options.mode
        if mode == "residual_only":
            reader.require_residuals(mode)
        if residuals is None and mode == "dpa":
            mode = "gate_only"
            logger.warning(
                "dpa-moe: %s has no residual table, so mode dpa serves as gate_only; run vllm-dpa "
                "profile to measure one",
                model,
            )
        # vLLM builds models under a default dtype of bf16, which holds neither 3.3 nor what C++ reads.
        k_bar = torch.tensor([options.initial_k_bar], dtype=torch.float32)
        path = "lut" if batch_invariant else "auto"
        state = cls(reader, options, mode, residuals, k_bar, path)
        logger.info(
            "dpa-moe: %d MoE layers, %s scales in groups of %d, %d of 8 chunks (%.1f MiB of "
            "experts), k_bar %g, mode %s, scope %s, %s kernel, %s activations",
            len(reader.layers),
            reader.settings.scale_layout,
            reader.settings.group_size,
            options.max_chunks,
            state.expert_bytes() / 2**20,
            float(state.k_bar),
            mode,
            options.scope,
            native.active_isa(),
            options.activations,
        )
        return state

    def expert_bytes(self) -> int:
        """Resident bytes of all routed experts."""
        settings, chunks = self.reader.settings, self.options.max_chunks
        return sum(
            layer.num_experts * layer.expert_bytes(chunks, settings)
            for layer in self.reader.manifest.layers
        )

    def add_layer(self, shape: LayerShape, experts: PackedLayer) -> None:
        """Make a loaded layer available to ``apply``."""
        index = list(self.reader.layers).index(shape.prefix)
        cost = LayerCost.of_layer(self.residuals, index, shape.num_experts, self.options.max_chunks)
        budget = budget_of(cost, self.k_bar, self.mode, self.options.scope)
        self.layers[shape.prefix] = LayerState(experts, budget)


_STATE: WorkerState | None = None


def open_worker(model: Path, options: RuntimeOptions, batch_invariant: bool) -> WorkerState:
    """The worker's state, made anew when a model is built in this process."""
    global _STATE
    _STATE = WorkerState.open(model, options, batch_invariant)
    return _STATE


def worker() -> WorkerState:
    """The state of the model in this process."""
    if _STATE is None:
        raise RuntimeError("no dpa-moe model was built in this process")
    return _STATE
