# SPDX-License-Identifier: Apache-2.0
"""The first kernel of a dispatch: activations as the matrix kernel takes them, and as much of the
allocation as needs no other program's result, in one launch."""

import triton
import triton.language as tl

from .allocate import allocate_pairs, gate_energy
from .fragments import column_factor, round16

# What the first programs of :func:`prepare` do.
NOTHING = tl.constexpr(0)
ALLOCATE_BATCH = tl.constexpr(1)  # one program: k of every pair of a small batch
ALLOCATE_TOKENS = tl.constexpr(2)  # one program per token: k of its pairs
SUM_ENERGIES = tl.constexpr(3)  # one program per expert: its gate energy and number of pairs


@triton.jit
def prepare_row(
    x, out, sums, row, part, columns, padded, stride, SCALED: tl.constexpr, SUMS: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Part ``part`` (of CHUNK columns) of one row: padded, scaled per column, summed per group."""
    column = part * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(x + row * stride + column, mask=column < columns, other=0.0).to(tl.float32)
    if SUMS:
        total = tl.sum(tl.reshape(values, (CHUNK // GROUP, GROUP)), 1)
        group = part * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        groups = padded // GROUP
        tl.store(sums + row * groups + group, total, mask=group < groups)
    if SCALED:
        values *= column_factor(column, BF16)
    tl.store(out + row * padded + column, round16(values, BF16), mask=column < padded)


@triton.jit
def prepare(
    x, out, sums, parts, columns, padded, stride, ids, gates, token_weights, floors, gains, table,
    k_bar, chunk_counts, energy, counts, num_pairs, allocating, WORK: tl.constexpr,
    SCALED: tl.constexpr, SUMS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    BF16: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, MOST: tl.constexpr,
    UNIFORM: tl.constexpr, GATES: tl.constexpr, WEIGHTED: tl.constexpr, FLOORS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Grid (allocating + rows * parts): the first ``allocating`` programs do WORK, the others
    :func:`prepare_row`."""
    program = tl.program_id(0)
    if program >= allocating:
        row = ((program - allocating) // parts).to(tl.int64)
        part = (program - allocating) % parts
        prepare_row(
            x, out, sums, row, part, columns, padded, stride, SCALED, SUMS, GROUP, CHUNK, BF16
        )
    elif WORK == SUM_ENERGIES:
        gate_energy(
            ids, gates, token_weights, energy, counts, program, num_pairs, TOP_K, GATES, WEIGHTED,
            CHUNK,
        )  # fmt: skip
    elif WORK != NOTHING:
        PER_TOKEN: tl.constexpr = WORK == ALLOCATE_TOKENS
        allocate_pairs(
            ids, gates, token_weights, floors, gains, table, k_bar, chunk_counts,
            program * TOP_K if PER_TOKEN else 0, TOP_K if PER_TOKEN else num_pairs, N,
            not PER_TOKEN, TOP_K, MOST, UNIFORM, GATES, WEIGHTED, FLOORS, ROUNDS,
        )  # fmt: skip
