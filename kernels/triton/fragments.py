# SPDX-License-Identifier: Apache-2.0
"""Device functions: words of planes (see ``layout.py``) to MMA operands.

A fragment is a tensor ``[W, r, q, a, h]`` = ``[4, 8, 4, 2, 2]``: one word, or one value of its row, per
element. ``S`` is the number of scale groups in a tile, ``s`` one of them; an operand covers the 128 rows
of a tile and the 128 / S columns of a group.

In the ``per_chunk`` bit order a masked word is a pair of powers of two as it stands: no shift and no
conversion per weight. Column ``8 p + 2 q + i`` yields ``2**exponent(p)``, so activations are scaled per
column by ``2**-(exponent(p) + A)``, which is exact, and results by ``2**A``.
"""

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of bf16 operands, truncates float32 to bf16, and does not
# run inline assembly.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# 2**A
RESULT_FACTOR_BF16 = tl.constexpr(2.0**63)
RESULT_FACTOR_FP16 = tl.constexpr(2.0**16)


@triton.jit
def dot(a, b):
    """float32 a @ b."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def dot_add(a, b, acc):
    """float32 acc + a @ b."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def round16(value, BF16: tl.constexpr):
    """float32 to bf16 or fp16, to nearest even."""
    if BF16:
        if INTERPRETED:
            bits = value.to(tl.uint32, bitcast=True)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
            # a NaN with a full mantissa must not round to infinity
            rounded = tl.where(value == value, rounded, 0x7FC0).to(tl.uint16)
            return rounded.to(tl.bfloat16, bitcast=True)
        else:
            return value.to(tl.bfloat16)
    else:
        return value.to(tl.float16)


@triton.jit
def column_factor(column, BF16: tl.constexpr):
    """float32 2**-(exponent(p) + A) of tile columns, what activations are multiplied by."""
    p = (column % 128) // 8
    if BF16:
        exponent = tl.where(p % 8 == 0, -126, (1 << (p % 8)) - 127)
        shift = -exponent - 63
    else:
        shift = 17 - p % 4 - 16
    return ((shift + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_plane(pointer, live):
    """Words of one tile, uint32 fragment; zeros unless ``live``. Streamed: not to be kept in L2."""
    i = tl.arange(0, 512)
    words = tl.load(pointer + i, mask=(i * 0 + live) != 0, other=0, eviction_policy="evict_first")
    return tl.reshape(words, (4, 8, 4, 2, 2)).to(tl.uint32, bitcast=True)


@triton.jit
def load_side(pointer, live):
    """Scales or offsets of one group of a tile, float32 fragment (equal along q)."""
    i = tl.arange(0, 512)
    values = tl.load(pointer + (i // 16) * 4 + i % 4, mask=(i * 0 + live) != 0, other=0.0)
    return tl.reshape(values, (4, 8, 4, 2, 2)).to(tl.float32)


@triton.jit
def load_sides(pointer, live, S: tl.constexpr):
    """Of all groups of a tile: float32 [4, 8, 4, 2, 2, S]."""
    i = tl.arange(0, 512)[:, None]
    s = tl.arange(0, S)[None, :]
    place = s * 128 + (i // 16) * 4 + i % 4
    values = tl.load(pointer + place, mask=(place * 0 + live) != 0, other=0.0)
    return tl.reshape(values, (4, 8, 4, 2, 2, S)).to(tl.float32)


@triton.jit
def to_accumulator(side):
    """A fragment, to be broadcast over accumulators [a, W, h, r, BM / 8, q, 2]."""
    return tl.permute(side, (3, 0, 4, 1, 2))[:, :, :, :, None, :, None]


@triton.jit
def rotate(words, LEFT: tl.constexpr):
    return (words << LEFT) | (words >> (32 - LEFT)) if LEFT else words


@triton.jit
def single_bits(words, s: tl.constexpr, S: tl.constexpr, BF16: tl.constexpr):
    """Pairs of bits as pairs of powers of two: uint32 [4, 8, 4, 2, 2, 16 / S]."""
    if BF16:
        # exponent bits 7 .. 14 take eight p at once
        if S == 1:
            turned = tl.join(words, rotate(words, 8))[:, :, :, :, :, :, None]
        elif S == 2:
            turned = rotate(words, 8 * s)[:, :, :, :, :, None, None]
        else:
            turned = rotate(words, 8 * (s // 2))[:, :, :, :, :, None, None]
        WIDTH: tl.constexpr = 4 if S == 4 else 8
        FIRST: tl.constexpr = 4 * (s % 2) if S == 4 else 0
    else:
        # exponent bits 7 .. 10 take four
        if S == 1:
            halves = tl.join(
                tl.join(words, rotate(words, 8)), tl.join(rotate(words, 28), rotate(words, 4))
            )
            turned = tl.reshape(halves, (4, 8, 4, 2, 2, 4))[:, :, :, :, :, :, None]
        elif S == 2:
            turned = tl.join(rotate(words, 8 * s), rotate(words, 28 - 24 * s))
            turned = turned[:, :, :, :, :, :, None]
        else:
            turned = rotate(words, (s // 2) * 8 if s % 2 == 0 else 28 - 24 * (s // 2))
            turned = turned[:, :, :, :, :, None, None]
        WIDTH: tl.constexpr = 4  # type: ignore[no-redef]
        FIRST: tl.constexpr = 0  # type: ignore[no-redef]
    mask = (0x00800080 << (FIRST + tl.arange(0, WIDTH))).to(tl.uint32)
    bits = turned & mask[None, None, None, None, None, None, :]
    return tl.reshape(bits, (4, 8, 4, 2, 2, 16 // S))


@triton.jit
def quad_codes(most, second, third, least, s: tl.constexpr, S: tl.constexpr, BF16: tl.constexpr):
    """Four planes in the ``geometric`` bit order as pairs of the numbers 128 + code (fp16: 1024 +
    code), code = 8 most + 4 second + 2 third + least: uint32 [4, 8, 4, 2, 2, 16 / S].

    Two steps of a butterfly transpose four bits of the four words.
    """
    EVEN_PAIRS = 0x33333333
    EVEN = 0x55555555
    t0 = (least & EVEN_PAIRS) | ((second << 2) & ~EVEN_PAIRS)
    t1 = (third & EVEN_PAIRS) | ((most << 2) & ~EVEN_PAIRS)
    t2 = ((least >> 2) & EVEN_PAIRS) | (second & ~EVEN_PAIRS)
    t3 = ((third >> 2) & EVEN_PAIRS) | (most & ~EVEN_PAIRS)
    c0 = (t0 & EVEN) | ((t1 << 1) & ~EVEN)
    c1 = ((t0 >> 1) & EVEN) | (t1 & ~EVEN)
    c2 = (t2 & EVEN) | ((t3 << 1) & ~EVEN)
    c3 = ((t2 >> 1) & EVEN) | (t3 & ~EVEN)
    codes = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (4, 8, 4, 2, 2, 1, 4))
    FIELDS: tl.constexpr = 4 // S
    shift = ((tl.arange(0, FIELDS) + s * FIELDS) * 4).to(tl.uint32)
    fields = codes >> shift[None, None, None, None, None, :, None]
    ONE: tl.constexpr = 0x43004300 if BF16 else 0x64006400
    return tl.reshape((fields & 0x000F000F) | ONE, (4, 8, 4, 2, 2, 16 // S))


@triton.jit
def operand(pairs, S: tl.constexpr, BF16: tl.constexpr, ASM: tl.constexpr):
    """uint32 pairs [4, 8, 4, 2, 2, 16 / S] -> bf16 or fp16 [128, 128 / S], rows and columns in order."""
    if ASM:
        # without it the compiler takes a pair apart with shifts and masks
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [pairs],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=1,
        )
    else:
        low = (pairs & 0xFFFF).to(tl.uint16)
        high = (pairs >> 16).to(tl.uint16)
    if BF16:
        both = tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))
    else:
        both = tl.join(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
    both = tl.permute(both, (3, 0, 4, 1, 5, 2, 6))  # a, W, h, r, p, q, i
    return tl.reshape(both, (128, 128 // S))


@triton.jit
def widen(value, BF16: tl.constexpr):
    """bf16 or fp16 to float32."""
    return unpack16(value.to(tl.uint16, bitcast=True).to(tl.uint32), BF16)


@triton.jit
def unpack16(bits, BF16: tl.constexpr):
    """The low 16 bits of a uint32 as float32."""
    if BF16:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pack16(value, BF16: tl.constexpr):
    """A float32, rounded to 16 bits, in the low half of a uint32."""
    return round16(value, BF16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def twice(value, BF16: tl.constexpr):
    """A float32, rounded to 16 bits, in both halves of a uint32."""
    half = pack16(value, BF16)
    return half | (half << 16)


@triton.jit
def fma_pairs(a, b, c, BF16: tl.constexpr, ASM: tl.constexpr):
    """a * b + c on pairs of bf16 or fp16."""
    if ASM:
        if BF16:
            return tl.inline_asm_elementwise(
                "fma.rn.bf16x2 $0, $1, $2, $3;",
                "=r,r,r,r",
                [a, b, c],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            )
        else:
            return tl.inline_asm_elementwise(
                "fma.rn.f16x2 $0, $1, $2, $3;",
                "=r,r,r,r",
                [a, b, c],
                dtype=tl.uint32,
                is_pure=True,
                pack=1,
            )
    else:
        low = unpack16(a & 0xFFFF, BF16) * unpack16(b & 0xFFFF, BF16) + unpack16(c & 0xFFFF, BF16)
        high = unpack16(a >> 16, BF16) * unpack16(b >> 16, BF16) + unpack16(c >> 16, BF16)
        return pack16(low, BF16) | (pack16(high, BF16) << 16)
