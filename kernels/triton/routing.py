# SPDX-License-Identifier: Apache-2.0
"""From routed tokens to the blocks that the matrix kernel takes, and back.

A pair is a (token, slot), numbered ``token * top_k + slot``; one with expert -1 is padding. Pairs are
sorted by (expert, k) into blocks of BM, so that a program of the matrix kernel reads one expert at one
k. Nothing here depends on the order in which programs run.
"""

import triton
import triton.language as tl

from .fragments import round16


@triton.jit
def count_pairs(
    ids, chunk_counts, counts, num_pairs, TIERS: tl.constexpr, TIERS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e counts expert e's pairs, of each k if TIERS > 1: ``counts`` int32 [E, TIERS].

    ``chunk_counts`` is [pairs], and not read if TIERS is 1.
    """
    expert = tl.program_id(0)
    tier = tl.arange(0, TIERS_PADDED)
    total = tl.zeros((TIERS_PADDED,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        mine = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) == expert
        if TIERS > 1:
            k = tl.load(chunk_counts + pair, mask=mine, other=0).to(tl.int32)
            mine_at = mine[:, None] & (k[:, None] == tier[None, :])
            total += tl.sum(mine_at.to(tl.int32), 0)
        else:
            total += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert * TIERS + tier, total, mask=tier < TIERS)


@triton.jit
def sort_pairs(
    ids, chunk_counts, counts, pairs, block_expert, block_k, num_blocks, num_pairs, experts,
    TIERS: tl.constexpr, BM: tl.constexpr, BUCKETS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e writes the blocks of expert e.

    Args:
        ids: [num_pairs].
        chunk_counts: k, [E] if TIERS is 1, else [num_pairs].
        counts: int32 [E, TIERS], see :func:`count_pairs`.
        pairs: int32 [max blocks, BM], num_pairs at padding.
        block_expert, block_k: int32 [max blocks].
        num_blocks: int32 [1].
    """
    expert = tl.program_id(0)
    bucket = tl.arange(0, BUCKETS)
    blocks = tl.load(counts + bucket, mask=bucket < experts * TIERS, other=0)
    blocks = (blocks + BM - 1) // BM
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
    first = tl.sum(tl.where(bucket < expert * TIERS, blocks, 0), 0)
    i = tl.arange(0, CHUNK)
    for tier in range(0, TIERS):
        count = tl.load(counts + expert * TIERS + tier)
        if count > 0:
            k = tier
            if TIERS == 1:
                k = tl.load(chunk_counts + expert).to(tl.int32)
            used = (count + BM - 1) // BM
            for start in range(0, used, CHUNK):
                tl.store(block_expert + first + start + i, expert, mask=start + i < used)
                tl.store(block_k + first + start + i, k, mask=start + i < used)
            for start in range(count, used * BM, CHUNK):
                place = pairs + first * BM + start + i
                tl.store(place, num_pairs, mask=start + i < used * BM)
            seen = 0
            for start in range(0, num_pairs, CHUNK):
                pair = start + i
                mine = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32) == expert
                if TIERS > 1:
                    mine = mine & (tl.load(chunk_counts + pair, mask=mine, other=0) == tier)
                rank = seen + tl.cumsum(mine.to(tl.int32), 0) - 1
                tl.store(pairs + first * BM + rank, pair, mask=mine)
                seen += tl.sum(mine.to(tl.int32), 0)
            first += used


@triton.jit
def combine(
    partial, ids, out, num_pairs, columns, TOP_K: tl.constexpr, SPLIT: tl.constexpr,
    CHUNK: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Program (t, c): sum of the token's pairs over parts and slots, in order, for CHUNK columns.

    Args:
        partial: float32 [SPLIT, num_pairs, columns].
        ids: [num_pairs]; a slot of -1 is not read.
        out: 16 bits [T, columns].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.float32)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        if tl.load(ids + pair) >= 0:
            for part in range(SPLIT):
                place = partial + (part * num_pairs + pair) * columns + column
                total += tl.load(place, mask=column < columns, other=0.0)
    tl.store(out + token * columns + column, round16(total, BF16), mask=column < columns)
