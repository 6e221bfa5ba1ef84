# SPDX-License-Identifier: Apache-2.0
"""Fused MoE on the GPU, host side: which kernels run in which order on which buffers.

    activations, allocation -> pairs in blocks -> w13, SiLU * up -> w2, gate -> sum over slots

Nothing waits for the device: grids are upper bounds, and what is in use is read by the kernels.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..budget import Budget
from ..planes import GEOMETRIC, NUM_TIERS
from . import prepare as first
from . import routing
from .allocate import NO_HINTS, Hints, from_energies, pair_constants, pair_tensors
from .expert_gemm import expert_gemm
from .fragments import INTERPRETED
from .layout import TILE, PackedLayer, PackedMatrix
from .tuning import Config, choose

DTYPES = (torch.bfloat16, torch.float16)
# Up to so many tokens a block holds a single pair, and nothing is sorted.
DIRECT_TOKENS = 4
_CHUNK = 1024  # elements that a program of the small kernels handles at a time


def fused_moe(
    x: Tensor,
    layer: PackedLayer,
    topk_weights: Tensor,
    topk_ids: Tensor,
    chunks: Tensor | Budget,
    config: Config | None = None,
    hints: Hints = NO_HINTS,
) -> Tensor:
    """Routed output of one MoE layer.

    Args:
        x: bfloat16 or float16 [T, H].
        layer: the packed experts.
        topk_weights: [T, K] gates, applied to the expert's output.
        topk_ids: int32 or int64 [T, K], at most the last expert; a negative id contributes nothing.
        chunks: int32 or int64 k, [E] (one per expert) or [T, K] (one per token and slot), within
            1..resident chunks wherever an expert is in use; or the budget under which they are
            allocated on the way. Neither ids nor k are read, so checked, on the host.
        config: how to run; by default what the tuning table says.
        hints: of the requests, for a budget.

    Returns:
        [T, H] in the dtype of ``x``.

    Raises:
        ValueError: sizes or dtypes that do not fit.
    """
    _check(x, layer, topk_weights, topk_ids, chunks)
    if not len(x):
        return torch.empty_like(x)
    tokens, top_k = topk_ids.shape
    config = config or choose(layer, tokens, top_k, x.dtype)
    ids, weights = topk_ids.contiguous(), topk_weights.float().contiguous()
    rows, counts, numbers = prepare(x, layer, weights, ids, chunks, config, hints)
    if len(x) <= DIRECT_TOKENS:
        blocks = Blocks.of_single_pairs(ids, counts)
    else:
        blocks = Blocks.of_sorted_pairs(ids, counts, numbers, layer.num_experts, config.block_m)
    hidden = gate_up(layer.w13, rows, blocks, ids, config)
    partial = down(layer.w2, hidden, blocks, weights, config)
    return combine(partial, ids, x.dtype)


@dataclass(frozen=True)
class Rows:
    """Activations as :func:`expert_gemm` takes them.

    Attributes:
        values: 16 bits [R, padded columns], scaled per column unless ``geometric``.
        sums: float32 [R, groups * parts_per_group]; of nothing where the mode needs none.
        parts_per_group: sums that make up one scale group.
        pairs_per_row: (token, slot) pairs that share a row.
    """

    values: Tensor
    sums: Tensor
    parts_per_group: int
    pairs_per_row: int


@dataclass(frozen=True)
class Blocks:
    """Pairs in blocks of one expert and one k each; see :func:`expert_gemm`.

    Attributes:
        pairs: int32 [most, BM]; unused where ``direct``.
        expert: [most].
        chunk_counts: k, [most] or, if ``per_expert``, [E].
        used: int32 [1], blocks in use; unused where ``direct``.
        most: an upper bound of the number of blocks.
        direct: a block is a pair.
    """

    pairs: Tensor
    expert: Tensor
    chunk_counts: Tensor
    used: Tensor
    most: int
    direct: bool
    per_expert: bool

    @classmethod
    def of_single_pairs(cls, ids: Tensor, chunks: Tensor) -> "Blocks":
        per_expert = chunks.dim() == 1
        return cls(ids, ids, chunks, ids, ids.numel(), direct=True, per_expert=per_expert)

    @classmethod
    def of_sorted_pairs(
        cls, ids: Tensor, chunks: Tensor, numbers: Tensor | None, experts: int, block_m: int
    ) -> "Blocks":
        """``numbers``: pairs of each expert, int32 [E], if they are known."""
        tiers = 1 if chunks.dim() == 1 else NUM_TIERS
        pairs, buckets = ids.numel(), experts * tiers
        most = (pairs + (block_m - 1) * min(pairs, buckets)) // block_m

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=ids.device)

        sorted_pairs, used, expert, k = new(most, block_m), new(1), new(most), new(most)
        if numbers is None:
            numbers = new(experts, tiers)
            routing.count_pairs[(experts,)](
                *(ids, chunks, numbers, pairs),
                TIERS=tiers,
                TIERS_PADDED=triton.next_power_of_2(tiers),
                CHUNK=_CHUNK if tiers == 1 else _CHUNK // 4,
            )
        routing.sort_pairs[(experts,)](
            *(ids, chunks, numbers, sorted_pairs, expert, k, used, pairs, experts),
            TIERS=tiers,
            BM=block_m,
            BUCKETS=triton.next_power_of_2(buckets),
            CHUNK=_CHUNK,
        )
        return cls(sorted_pairs, expert, k, used, most, direct=False, per_expert=False)


def prepare(
    x: Tensor,
    layer: PackedLayer,
    gates: Tensor,
    ids: Tensor,
    chunks: Tensor | Budget,
    config: Config,
    hints: Hints,
) -> tuple[Rows, Tensor, Tensor | None]:
    """Activations padded, scaled and summed for w13; k, [E] or [T, K]; and the number of pairs of
    each expert, int32 [E], where it was counted on the way."""
    shape, (tokens, top_k) = layer.w13.shape, ids.shape
    padded = shape.column_tiles * TILE
    values = torch.empty(tokens, padded, dtype=x.dtype, device=x.device)
    groups = padded // shape.group_size if config.needs_sums else 0
    sums = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = triton.cdiv(padded, _CHUNK)
    work = _Allocation.plan(gates, ids, chunks, hints)
    first.prepare[(work.programs + tokens * parts,)](
        *(x, values, sums, parts, shape.columns, padded, x.stride(0), *work.tensors),
        *(ids.numel(), work.programs),
        SCALED=config.scales_columns,
        SUMS=config.needs_sums,
        GROUP=shape.group_size,
        CHUNK=_CHUNK,
        BF16=x.dtype == torch.bfloat16,
        **work.constants,
    )
    rows = Rows(values, sums, parts_per_group=1, pairs_per_row=top_k)
    if isinstance(chunks, Budget) and work.energies:
        return rows, from_energies(*work.energies, chunks, hints), work.energies[1]
    return rows, work.counts, None


@dataclass(frozen=True)
class _Allocation:
    """What the first programs of :func:`.prepare.prepare` do about k.

    Attributes:
        programs: their number.
        tensors: from ``ids`` to ``counts`` in the kernel's arguments.
        constants: the kernel's, as far as they are about k.
        counts: k, int32 [T, K] to be written, or as it was given.
        energies: gate energy and number of pairs per expert, if those are what is computed.
    """

    programs: int
    tensors: tuple[Tensor, ...]
    constants: dict[str, int | bool]
    counts: Tensor
    energies: tuple[Tensor, Tensor] | None

    @classmethod
    def plan(
        cls, gates: Tensor, ids: Tensor, chunks: Tensor | Budget, hints: Hints
    ) -> "_Allocation":
        tokens, top_k = ids.shape
        if not isinstance(chunks, Budget):
            counts = chunks.contiguous()
            nothing = dict.fromkeys(("MOST", "UNIFORM", "GATES", "WEIGHTED", "FLOORS", "ROUNDS"), 0)
            constants = {"WORK": first.NOTHING.value, "N": 1, "TOP_K": top_k, **nothing}
            return cls(0, (ids, *(gates,) * 6, counts, gates, counts), constants, counts, None)
        counts = torch.empty(tokens, top_k, dtype=torch.int32, device=ids.device)
        energy = torch.empty(chunks.num_experts, dtype=torch.float32, device=ids.device)
        number = torch.empty(chunks.num_experts, dtype=torch.int32, device=ids.device)
        if chunks.per_token:
            work, programs, items = first.ALLOCATE_TOKENS, tokens, top_k
        elif tokens <= DIRECT_TOKENS:
            work, programs, items = first.ALLOCATE_BATCH, 1, tokens * top_k
        else:
            work, programs, items = first.SUM_ENERGIES, chunks.num_experts, 1
        tensors = (*pair_tensors(gates, ids, chunks, hints), counts, energy, number)
        constants = {
            "WORK": work.value,
            "N": triton.next_power_of_2(items),
            **pair_constants(chunks, hints, top_k),
        }
        energies = (energy, number) if work is first.SUM_ENERGIES else None
        return cls(programs, tensors, constants, counts, energies)


def gate_up(w13: PackedMatrix, rows: Rows, blocks: Blocks, ids: Tensor, config: Config) -> Rows:
    """silu(gate) * up of every pair."""
    pairs, columns = ids.numel(), w13.shape.row_tiles * TILE // 2
    values = rows.values.new_empty(pairs, columns)
    part = min(w13.shape.group_size, TILE // 2)
    sums = rows.sums.new_empty(pairs, columns // part if config.needs_sums else 0)
    _multiply(w13, rows, blocks, values, sums, sums, config, part=part, split=1)
    return Rows(values, sums, w13.shape.group_size // part, pairs_per_row=1)


def down(w2: PackedMatrix, hidden: Rows, blocks: Blocks, weights: Tensor, config: Config) -> Tensor:
    """Gate times output of every pair, float32 [parts, pairs, H]; parts are to be added."""
    shape = (config.split, len(hidden.values), w2.shape.rows)
    partial = torch.empty(shape, dtype=torch.float32, device=weights.device)
    _multiply(w2, hidden, blocks, partial, weights, weights, config, part=1, split=config.split)
    return partial


def _multiply(
    matrix: PackedMatrix,
    rows: Rows,
    blocks: Blocks,
    out: Tensor,
    out_sums: Tensor,
    weights: Tensor,
    config: Config,
    part: int,
    split: int,
) -> None:
    shape = matrix.shape
    scale_stride = 0 if shape.scale_layout == GEOMETRIC else matrix.scales.stride(0)
    expert_gemm[(shape.row_tiles * split, blocks.most)](
        *(rows.values, rows.sums, matrix.planes, matrix.scales, matrix.offset, matrix.gain),
        *(out, out_sums, weights, blocks.pairs, blocks.expert, blocks.chunk_counts, blocks.used),
        *(out.shape[-2], shape.row_tiles, shape.column_tiles, shape.rows),
        *(rows.values.stride(0), rows.sums.stride(0), out.stride(-2), out_sums.stride(0)),
        *(rows.pairs_per_row, matrix.planes.stride(0), matrix.planes.stride(1)),
        *(scale_stride, matrix.offset.stride(0)),
        GATED=shape.gated,
        MODE=config.mode,
        DIRECT=blocks.direct,
        BM=config.block_m,
        PLANES=config.planes,
        S=shape.groups_per_tile,
        PARTS=rows.parts_per_group,
        OUT_PART=part,
        SPLIT=split,
        PER_EXPERT=blocks.per_expert,
        BF16=rows.values.dtype == torch.bfloat16,
        ASM=not INTERPRETED.value and torch.version.hip is None,
        STAGES=config.stages,
        num_warps=config.warps,
    )


def combine(partial: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over parts and slots, [T, H]."""
    tokens, top_k = ids.shape
    split, pairs, columns = partial.shape
    out = torch.empty(tokens, columns, dtype=dtype, device=ids.device)
    routing.combine[(tokens, triton.cdiv(columns, _CHUNK))](
        *(partial, ids, out, pairs, columns),
        TOP_K=top_k,
        SPLIT=split,
        CHUNK=_CHUNK,
        BF16=dtype == torch.bfloat16,
    )
    return out


def _check(
    x: Tensor, layer: PackedLayer, weights: Tensor, ids: Tensor, chunks: Tensor | Budget
) -> None:
    if x.dtype not in DTYPES or x.dim() != 2 or x.shape[1] != layer.hidden_size:
        raise ValueError(
            f"x must be bfloat16 or float16 [T, {layer.hidden_size}], got {x.dtype} "
            f"{tuple(x.shape)}"
        )
    integers = (torch.int32, torch.int64)
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.dtype not in integers:
        raise ValueError(f"topk_ids must be int32 or int64 [T, K], got {ids.dtype} {ids.shape}")
    if weights.shape != ids.shape:
        raise ValueError(f"topk_weights {tuple(weights.shape)} do not fit ids {tuple(ids.shape)}")
    if isinstance(chunks, Budget):
        if chunks.num_experts != layer.num_experts or chunks.max_chunks > layer.num_chunks:
            raise ValueError(
                f"a budget for {chunks.num_experts} experts of up to {chunks.max_chunks} chunks does "
                f"not fit a layer of {layer.num_experts} experts with {layer.num_chunks}"
            )
        return
    fits = chunks.shape == ids.shape or chunks.shape == (layer.num_experts,)
    if not fits or chunks.dtype not in integers:
        raise ValueError(
            f"chunks must be int32 or int64 [{layer.num_experts}] or {tuple(ids.shape)}, got "
            f"{chunks.dtype} {tuple(chunks.shape)}"
        )
