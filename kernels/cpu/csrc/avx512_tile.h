// SPDX-License-Identifier: Apache-2.0
// What the AVX512 and the AMX tile share: a (block, group) decoded to u8, and int8 activations in the
// order of its columns.
#pragma once

#include <immintrin.h>

#include "layout.h"
#include "plain_math.h"

#define INLINE static inline __attribute__((always_inline))

// How far ahead of use planes are fetched, in bytes: a few blocks, about one DRAM latency.
constexpr int kAhead = 2048;

INLINE __m512 load_half(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

INLINE void prefetch(const uint8_t* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + kAhead + i), _MM_HINT_T1);
}

// int8 codes in the order in which a tile holds its columns, then a float per group: the sum of the inputs
// as rounded, which is what the centre is taken off by. Of the exact sum, their rounding would not cancel.
static inline int64_t tile_bytes(int64_t groups, int group_size) {
    return groups * group_size + (4 * groups + 63) / 64 * 64;
}

static inline void tile_prepare(const float* x, int64_t first, int64_t last, int64_t groups, int group_size,
                                uint8_t* codes, float* scale, float* sum) {
    float* const rounded_sum = reinterpret_cast<float*>(codes + groups * group_size);
    for (int64_t g = first; g < last; g++, x += group_size) {
        float largest;
        int32_t q[kMaxGroup], total = 0;
        group_stats(x, group_size, &largest, &sum[g]);
        scale[g] = quantise(x, group_size, largest, 127.0f, q);
        uint8_t* const to = codes + g * group_size;
        // Bit b of the four bytes of dword c: columns 32c + {0, 8, 16, 24} + b.
        for (int i = 0; i < group_size; i++) {
            const int c = i / 32, byte = i % 32 / 8, b = i % 8;
            to[c * 32 + b * 4 + byte] = static_cast<uint8_t>(q[i]);
            total += q[i];
        }
        rounded_sum[g] = static_cast<float>(total) * scale[g];
    }
}

// A decoded half block: u8 weight = offset + step * (u8 - centre).
struct HalfTile {
    __m512 step, offset;
};

// [group_size / 4][16 rows][4 columns] u8. Exact for geometric scales; a per_chunk one is rounded to 255
// levels of its own range, from the small end in running sums so that they add up exactly.
INLINE HalfTile decode_half(const Matrix& w, int k, int64_t at, int n, uint8_t* tile) {
    const int half_bytes = 2 * w.group_size;
    const int64_t stride = plane_stride(w.group_size, w.geometric);
    const uint8_t* const sides = w.sides + at * sides_stride(w.geometric) + 32 * n;
    __m512i weight[kMaxChunks];  // of one bit of plane j, in all four bytes of a row
    HalfTile result;
    result.offset = load_half(sides);
    if (w.geometric) {
        for (int j = 0; j < k; j++) weight[j] = _mm512_set1_epi8(static_cast<char>(1 << (k - 1 - j)));
        result.step =
            _mm512_mul_ps(load_half(sides + 2 * kRows), _mm512_set1_ps(2.0f / static_cast<float>(1 << (k - 1))));
    } else {
        __m512 scale[kMaxChunks], total = _mm512_setzero_ps();
        for (int j = 0; j < k; j++) {
            scale[j] = load_half(w.plane[j] + at * stride + 2 * half_bytes + 32 * n);
            total = _mm512_add_ps(total, scale[j]);
        }
        result.step = _mm512_mul_ps(total, _mm512_set1_ps(2.0f / 255.0f));
        const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(255.0f), _mm512_max_ps(total, _mm512_set1_ps(1e-20f)));
        __m512 running = _mm512_setzero_ps();
        __m512i before = _mm512_setzero_si512();
        for (int j = k - 1; j >= 0; j--) {
            running = _mm512_fmadd_ps(scale[j], inverse, running);
            const __m512i rounded = _mm512_cvtps_epi32(running);
            weight[j] = _mm512_mullo_epi32(_mm512_sub_epi32(rounded, before), _mm512_set1_epi32(0x01010101));
            before = rounded;
        }
    }
    for (int c = 0; c < w.group_size / 32; c++) {
        __m512i u[8];
        for (int b = 0; b < 8; b++) u[b] = _mm512_setzero_si512();
        for (int j = 0; j < k; j++) {
            const uint8_t* const bits = w.plane[j] + at * stride + n * half_bytes + 64 * c;
            const __m512i v = _mm512_loadu_si512(bits);
            prefetch(bits, 64);
#pragma GCC unroll 8
            for (int b = 0; b < 8; b++) {
                const __mmask64 set = _mm512_test_epi8_mask(v, _mm512_set1_epi8(static_cast<char>(1 << b)));
                u[b] = _mm512_mask_add_epi8(u[b], set, u[b], weight[j]);
            }
        }
        for (int b = 0; b < 8; b++) _mm512_store_si512(tile + (c * 8 + b) * 64, u[b]);
    }
    return result;
}

// The u8 of weight 0 where the offset is 0.
INLINE float tile_centre(const Matrix& w, int k) {
    return w.geometric ? 0.5f * static_cast<float>((1 << k) - 1) : 127.5f;
}

// What one group of one token adds to its outputs, but for the integer dot products.
struct GroupOfToken {
    __m512 scale, from_centre, sum;
};

INLINE GroupOfToken group_of_token(const Activation& x, int64_t groups, int group_size, int64_t g, float centre) {
    float rounded_sum;
    memcpy(&rounded_sum, x.codes + groups * group_size + 4 * g, 4);
    return {_mm512_set1_ps(x.scale[g]), _mm512_mul_ps(_mm512_set1_ps(-centre), _mm512_set1_ps(rounded_sum)),
            _mm512_set1_ps(x.sum[g])};
}

// out[16] += 16 rows of a half block times one group of one token.
INLINE void add_half(__m512i dot, const GroupOfToken& token, const HalfTile& half, float* out) {
    const __m512 value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), token.scale, token.from_centre);
    const __m512 total = _mm512_fmadd_ps(value, half.step, _mm512_loadu_ps(out));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(half.offset, token.sum, total));
}
