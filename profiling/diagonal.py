# SPDX-License-Identifier: Apache-2.0
"""Does the allocator's cost rank allocations as the true error does?

The allocator adds up ``G_e R[e, k_e]`` over the experts of a dispatch, as if their errors never met. In
truth the errors of a token's experts are summed before they count. This compares both over random
allocations, by rank correlation (Spearman) for every budget.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from vllm_dpa.checkpoint import CheckpointReader, Residuals
from vllm_dpa.kernels.planes import MIN_CHUNKS, NUM_CHUNKS, NUM_TIERS, PlaneStack
from vllm_dpa.kernels.tier_decoder import TierDecoder
from vllm_dpa.profiling.calibration import LayerInputs
from vllm_dpa.profiling.fitters import CalibrationData
from vllm_dpa.profiling.layer_fit import Advance
from vllm_dpa.profiling.source import SourceCheckpoint

BUDGETS = (3, 4, 5, 6)
ALLOCATIONS = 200
TOKENS = 256


def check_diagonal(
    checkpoint: CheckpointReader,
    source: SourceCheckpoint,
    calibration: CalibrationData,
    residuals: Residuals,
    advance: Advance | None = None,
) -> list[dict[str, Any]]:
    """Rank correlation of the additive and the exact cost of one dispatch of ``TOKENS`` tokens.

    Args:
        checkpoint: the encoded model, with all chunks.
        source: the model it was encoded from.
        calibration: what its experts see.
        residuals: R of ``checkpoint``.
        advance: called with the number of layers done, for progress.

    Returns:
        Rows of ``layer``, ``k_bar`` and ``spearman``.
    """
    rows = []
    for i, layer in enumerate(checkpoint.manifest.layers):
        inputs = calibration.inputs(layer.prefix)
        stride = max(1, len(inputs.ids) // TOKENS)
        sample = LayerInputs(
            inputs.hidden[::stride][:TOKENS],
            inputs.ids[::stride][:TOKENS],
            inputs.gates[::stride][:TOKENS],
            layer.num_experts,
        )
        errors = _errors(sample, source, layer.prefix, checkpoint.read_layer(layer.prefix))
        energy = torch.zeros(layer.num_experts).index_add_(
            0, sample.ids.flatten(), sample.gates.clamp_min(0).square().flatten()
        )
        table = energy[:, None] * residuals.r[i, : layer.num_experts]
        generator = torch.Generator().manual_seed(i)
        for k_bar in BUDGETS:
            counts = [_random_counts(sample.ids, k_bar, generator) for _ in range(ALLOCATIONS)]
            exact = torch.stack([_exact(sample, errors, k) for k in counts])
            additive = torch.stack([table.gather(1, k[:, None]).sum() for k in counts])
            rows.append(
                {"layer": layer.prefix, "k_bar": k_bar, "spearman": spearman(exact, additive)}
            )
        if advance is not None:
            advance(1)
    return rows


@torch.inference_mode()
def _errors(
    inputs: LayerInputs,
    source: SourceCheckpoint,
    prefix: str,
    stacks: tuple[PlaneStack, PlaneStack],
) -> Tensor:
    """Gated output error of every token's experts at every tier, float32 [T, K, 9, H]."""
    tokens, slots = inputs.ids.shape
    out = torch.zeros(tokens, slots, NUM_TIERS, inputs.hidden.shape[1])
    for expert in inputs.ids.unique().tolist():
        token, slot = torch.where(inputs.ids == expert)
        x, gate = inputs.hidden[token], inputs.gates[token, slot, None]

        def output(w13: Tensor, w2: Tensor, x: Tensor = x) -> Tensor:
            gate_rows, up_rows = linear(x, w13).chunk(2, dim=-1)
            return linear(silu(gate_rows) * up_rows, w2)

        exact = output(*source.expert(prefix, expert))
        first, second = (TierDecoder(stack, expert) for stack in stacks)
        for k in range(MIN_CHUNKS, NUM_TIERS):
            out[token, slot, k] = gate * (output(first.advance(k), second.advance(k)) - exact)
    return out


def _random_counts(ids: Tensor, k_bar: int, generator: torch.Generator) -> Tensor:
    """k of every expert, int64 [E]: random within the bounds, active experts sum to the budget."""
    active = ids.unique()
    counts = torch.full((int(ids.max()) + 1,), MIN_CHUNKS)
    k = torch.randint(MIN_CHUNKS, NUM_CHUNKS + 1, (len(active),), generator=generator)
    while (surplus := int(k.sum()) - k_bar * len(active)) != 0:
        step = -1 if surplus > 0 else 1
        movable = torch.nonzero(k != (MIN_CHUNKS if surplus > 0 else NUM_CHUNKS))[:, 0]
        chosen = movable[torch.randperm(len(movable), generator=generator)[: abs(surplus)]]
        k[chosen] += step
    counts[active] = k
    return counts


def _exact(inputs: LayerInputs, errors: Tensor, counts: Tensor) -> Tensor:
    """Squared error of the layer's output, summed over tokens, per element of the output."""
    k = counts[inputs.ids][..., None, None].expand(-1, -1, 1, errors.shape[-1])
    return errors.gather(2, k)[:, :, 0].sum(1).square().mean(1).sum()


def spearman(a: Tensor, b: Tensor) -> float:
    """Correlation of the ranks of two samples without ties."""
    ranks = torch.stack([values.argsort().argsort().double() for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])
