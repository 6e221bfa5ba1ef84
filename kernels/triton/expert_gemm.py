# SPDX-License-Identifier: Apache-2.0
"""The kernel: one tile of 128 output rows of one expert, for a block of its tokens.

A program owns tile ``program_id(0)`` (and, where columns are split, one part of them) for the block of
``BM`` (token, slot) pairs ``program_id(1)``, all of one expert at one k. It walks the tiles of the row
and the planes of each in one flat software-pipelined loop: k comes from memory, and planes past it are
masked, so one compiled kernel serves every mixture of k.

    sep     ``per_chunk`` scales: an MMA per plane, the scale applied in float32 to its result
    deq     ``per_chunk`` scales: weights rounded to 16 bits, an MMA per block of planes
    shared  ``geometric`` scales: four planes are one operand of exact integers, an MMA per four planes
"""

import triton
import triton.language as tl

from .fragments import (
    RESULT_FACTOR_BF16,
    RESULT_FACTOR_FP16,
    column_factor,
    dot,
    dot_add,
    fma_pairs,
    load_plane,
    load_side,
    load_sides,
    operand,
    quad_codes,
    round16,
    single_bits,
    to_accumulator,
    twice,
    widen,
)


@triton.jit
def load_tokens(x, x_row, valid, column, S: tl.constexpr):
    """Activations [128 / S, BM] of one group of columns."""
    columns = column + tl.arange(0, 128 // S)
    return tl.load(x + x_row[None, :] + columns[:, None], mask=valid[None, :], other=0.0)


@triton.jit
def load_sums(sums, row, valid, group, PARTS: tl.constexpr, BM: tl.constexpr):
    """Sums of activations over one group, float32 [1, W, 1, r, BM / 8, q, 2]."""
    total = tl.load(sums + row + group * PARTS, mask=valid, other=0.0)
    if PARTS == 2:
        total += tl.load(sums + row + group * PARTS + 1, mask=valid, other=0.0)
    total = tl.permute(tl.reshape(total, (4, 8, 4, BM // 8, 2)), (0, 1, 3, 2, 4))
    return total[None, :, None, :, :, :, :]


@triton.jit
def accumulate_sep(
    acc, k, first, steps, x, x_row, valid, sums, sum_row, sum_valid, planes, scales, offset,
    plane_stride, scale_stride, PLANES: tl.constexpr, PARTS: tl.constexpr, S: tl.constexpr,
    BM: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W x = sum_g (offset - sum_j s_j) sum(x) + sum_j 2 s_j (bits_j x)."""
    UNIT: tl.constexpr = 2 * (RESULT_FACTOR_BF16 if BF16 else RESULT_FACTOR_FP16)
    tile = first
    j = first * 0
    for _ in tl.range(0, steps, num_stages=STAGES):
        for s in tl.static_range(S):
            xt = load_tokens(x, x_row, valid, tile * 128 + s * (128 // S), S)
            total = load_sums(sums, sum_row, sum_valid, tile * S + s, PARTS, BM)
            base = load_side(offset + (tile * S + s) * 128, j == 0)
            for b in tl.static_range(PLANES):
                live = j + b < k
                words = load_plane(planes + (j + b) * plane_stride + tile * 512, live)
                scale = load_side(scales + (j + b) * scale_stride + (tile * S + s) * 128, live)
                d = dot(operand(single_bits(words, s, S, BF16), S, BF16, ASM), xt)
                d = tl.reshape(d, (2, 4, 2, 8, BM // 8, 4, 2))
                acc += to_accumulator(scale * UNIT) * d
                base -= scale
            acc += to_accumulator(base) * total
        j += PLANES
        done = j >= k
        tile = tl.where(done, tile + 1, tile)
        j = tl.where(done, 0, j)
    return acc


@triton.jit
def spread(values, S: tl.constexpr):
    """[4, 8, 4, 2, 2, S] -> [4, 8, 4, 2, 2, 16], each value for the columns of its group."""
    wide = tl.broadcast_to(values[:, :, :, :, :, :, None], (4, 8, 4, 2, 2, S, 16 // S))
    return tl.reshape(wide, (4, 8, 4, 2, 2, 16))


@triton.jit
def accumulate_deq(
    acc, k, first, steps, x, x_row, valid, planes, scales, offset, plane_stride, scale_stride,
    PLANES: tl.constexpr, S: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Weights x 2**(exponent(p) + A) in 16 bits: base first, then planes from the largest scale down, so
    that what is rounded shrinks towards the weight itself."""
    UP: tl.constexpr = RESULT_FACTOR_BF16 if BF16 else RESULT_FACTOR_FP16
    place = tl.arange(0, 16) % (8 if BF16 else 4)
    ones = (0x00800080 << place).to(tl.uint32)[None, None, None, None, None, :]
    ones = tl.broadcast_to(ones, (4, 8, 4, 2, 2, 16))
    nothing = tl.zeros((4, 8, 4, 2, 2, 16), tl.uint32)
    tile = first
    j = first * 0
    for _ in tl.range(0, steps, num_stages=STAGES):
        xt = load_tokens(x, x_row, valid, tile * 128, 1)
        # the scales as they are rounded: a bit then errs by the same amount whether it is set or not
        base = load_sides(offset + tile * S * 128, j == 0, S) * UP
        for b in tl.static_range(PLANES):
            side = scales + (j + b) * scale_stride + tile * S * 128
            scale = round16(load_sides(side, j + b < k, S) * (2 * UP), BF16)
            base -= 0.5 * widen(scale, BF16)
        weights = fma_pairs(ones, spread(twice(base, BF16), S), nothing, BF16, ASM)
        for b in tl.static_range(PLANES):
            live = j + b < k
            words = load_plane(planes + (j + b) * plane_stride + tile * 512, live)
            side = scales + (j + b) * scale_stride + tile * S * 128
            scale = twice(load_sides(side, live, S) * (2 * UP), BF16)
            weights = fma_pairs(
                single_bits(words, 0, 1, BF16), spread(scale, S), weights, BF16, ASM
            )
        acc = dot_add(operand(weights, 1, BF16, ASM), xt, acc)
        j += PLANES
        done = j >= k
        tile = tl.where(done, tile + 1, tile)
        j = tl.where(done, 0, j)
    return acc


@triton.jit
def accumulate_shared(
    acc, k, first, steps, x, x_row, valid, sums, sum_row, sum_valid, planes, scales, offset,
    plane_stride, PARTS: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BF16: tl.constexpr,
    ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """scale_j = scale / 2**j: planes j .. j + 3 are ``step * code`` with ``step = scale / 2**(j + 2)``,
    less the sum of their scales, step * (8 + 4 + 2 + 1) / 2 for all four."""
    ORIGIN: tl.constexpr = 128.0 if BF16 else 1024.0
    tile = first
    j = first * 0
    for _ in tl.range(0, steps, num_stages=STAGES):
        words = planes + j * plane_stride + tile * 512
        most = load_plane(words, j < k)
        second = load_plane(words + plane_stride, j + 1 < k)
        third = load_plane(words + 2 * plane_stride, j + 2 < k)
        least = load_plane(words + 3 * plane_stride, j + 3 < k)
        present = tl.minimum(k - j, 4)
        half = (16 - (16 >> present)).to(tl.float32) * 0.5
        unit = tl.where(j == 0, 0.25, 0.015625)
        for s in tl.static_range(S):
            xt = load_tokens(x, x_row, valid, tile * 128 + s * (128 // S), S)
            total = load_sums(sums, sum_row, sum_valid, tile * S + s, PARTS, BM)
            base = load_side(offset + (tile * S + s) * 128, j == 0)
            step = load_side(scales + (tile * S + s) * 128, j < k) * unit
            codes = quad_codes(most, second, third, least, s, S, BF16)
            d = tl.reshape(dot(operand(codes, S, BF16, ASM), xt), (2, 4, 2, 8, BM // 8, 4, 2))
            acc += to_accumulator(step) * d
            acc += to_accumulator(base - (ORIGIN + half) * step) * total
        j += 4
        done = j >= k
        tile = tl.where(done, tile + 1, tile)
        j = tl.where(done, 0, j)
    return acc


@triton.jit
def store_gated(
    acc, gate_gain, up_gain, out, out_sums, pair, valid, stride_out, stride_sums, tile,
    SCALED: tl.constexpr, SUMS: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of 64 columns, scaled for the next matrix, and their sums per PART columns."""
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, 64, BM)), (1, 2, 0)))
    gate *= gate_gain
    hidden = round16(gate / (1.0 + tl.exp(-gate)) * (up * up_gain), BF16).to(tl.float32)
    column = tile * 64 + tl.arange(0, 64)
    if SUMS:
        parts = tl.sum(tl.reshape(hidden, (64 // PART, PART, BM)), 1)
        part = tile * (64 // PART) + tl.arange(0, 64 // PART)
        place = out_sums + pair[None, :] * stride_sums + part[:, None]
        tl.store(place, parts, mask=valid[None, :])
    if SCALED:
        hidden *= column_factor(column, BF16)[:, None]
    place = out + pair[None, :] * stride_out + column[:, None]
    tl.store(place, round16(hidden, BF16), mask=valid[None, :])


@triton.jit
def expert_gemm(
    x, sums, planes, scales, offset, gain, out, out_sums, weights, pairs, block_expert, chunk_counts,
    num_blocks, num_pairs, row_tiles, column_tiles, rows, stride_x, stride_sums, stride_out,
    stride_out_sums, pairs_per_row, plane_stride, plane_expert, scale_stride, side_expert,
    GATED: tl.constexpr, MODE: tl.constexpr, DIRECT: tl.constexpr, BM: tl.constexpr,
    PLANES: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr, OUT_PART: tl.constexpr,
    SPLIT: tl.constexpr, PER_EXPERT: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (row_tiles * SPLIT, blocks).

    Args:
        x: 16 bits [rows of x, stride_x], row = pair // pairs_per_row; columns scaled by
            ``column_factor`` unless ``shared``.
        sums: float32 [rows of x, stride_sums], PARTS sums of x per group; not used by ``deq``.
        planes, scales, offset, gain: see ``layout.py``; strides in elements.
        out: 16 bits [pairs, stride_out] if GATED, else float32 [SPLIT, pairs, stride_out].
        out_sums: float32 [pairs, stride_out_sums], sums per OUT_PART columns of ``out`` if GATED.
        weights: float32 [pairs], applied unless GATED.
        pairs: int32 [blocks, BM], num_pairs at padding.
        block_expert: [blocks]; an expert of -1 is skipped.
        chunk_counts: k, [E] if PER_EXPERT, else [blocks].
        num_blocks: int32 [1], blocks in use.
        DIRECT: block b is pair b alone; ``pairs`` and ``num_blocks`` are not read.
    """
    block = tl.program_id(1)
    if not DIRECT:  # noqa: SIM102 (decided when compiled; the other is not)
        if block >= tl.load(num_blocks):
            return
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    k = tl.load(chunk_counts + (expert if PER_EXPERT else block)).to(tl.int32)
    tile = tl.program_id(0) % row_tiles
    part = tl.program_id(0) // row_tiles
    # token columns in order, and in the order of accumulator fragments
    i = tl.arange(0, BM)
    f = tl.arange(0, 32 * BM)
    f = 8 * ((f // 2) % (BM // 8)) + 2 * ((f // (2 * (BM // 8))) % 4) + f % 2
    if DIRECT:
        pair = block + i * 0
        valid = i == 0
        sum_pair = block + f * 0
        sum_valid = f == 0
    else:
        pair = tl.load(pairs + block * BM + i)
        valid = pair < num_pairs
        sum_pair = tl.load(pairs + block * BM + f)
        sum_valid = sum_pair < num_pairs
    pair = pair.to(tl.int64)
    x_row = pair // pairs_per_row * stride_x
    sum_row = sum_pair.to(tl.int64) // pairs_per_row * stride_sums
    # strides of a plane times its number pass 2**31
    plane_stride = plane_stride.to(tl.int64)
    scale_stride = scale_stride.to(tl.int64)
    planes += expert * plane_expert + tile * column_tiles * 512
    scales += expert * side_expert + tile * column_tiles * S * 128
    offset += expert * side_expert + tile * column_tiles * S * 128
    first = column_tiles * part // SPLIT
    steps = column_tiles * (part + 1) // SPLIT - first
    steps *= (k + PLANES - 1) // PLANES
    if MODE == "deq":
        acc = accumulate_deq(
            tl.zeros((128, BM), tl.float32), k, first, steps, x, x_row, valid, planes, scales,
            offset, plane_stride, scale_stride, PLANES, S, BF16, ASM, STAGES,
        )  # fmt: skip
    else:
        acc = tl.zeros((2, 4, 2, 8, BM // 8, 4, 2), tl.float32)
        if MODE == "sep":
            acc = accumulate_sep(
                acc, k, first, steps, x, x_row, valid, sums, sum_row, sum_valid, planes, scales,
                offset, plane_stride, scale_stride, PLANES, PARTS, S, BM, BF16, ASM, STAGES,
            )  # fmt: skip
        else:
            acc = accumulate_shared(
                acc, k, first, steps, x, x_row, valid, sums, sum_row, sum_valid, planes, scales,
                offset, plane_stride, PARTS, S, BM, BF16, ASM, STAGES,
            )  # fmt: skip
        acc = tl.reshape(acc, (128, BM))
    if GATED:
        store_gated(
            acc, tl.load(gain + expert * 18 + k), tl.load(gain + expert * 18 + 9 + k), out, out_sums,
            pair, valid, stride_out, stride_out_sums, tile, MODE != "shared", MODE != "deq",
            OUT_PART, BM, BF16,
        )  # fmt: skip
    else:
        factor = tl.load(weights + pair, mask=valid, other=0.0) * tl.load(gain + expert * 9 + k)
        row = tile * 128 + tl.arange(0, 128)
        place = out + (part.to(tl.int64) * num_pairs + pair)[None, :] * stride_out + row[:, None]
        tl.store(place, acc * factor[None, :], mask=valid[None, :] & (row < rows)[:, None])
