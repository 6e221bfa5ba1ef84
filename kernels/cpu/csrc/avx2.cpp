// SPDX-License-Identifier: Apache-2.0
// AVX2 with FMA and F16C. The lut of avx512.cpp with a byte lane per row: pshufb looks one quad up for
// 32 rows, and maddubs adds the two quads of a column byte. It wins at any number of tokens: without VNNI
// a tile of integers is multiplied too slowly.
#include <immintrin.h>

#include "layout.h"
#include "lut_tables.h"
#include "plain_math.h"

namespace {

#define INLINE static inline __attribute__((always_inline))

constexpr int kAhead = 2048;

// Tables [quad][16]: int8 entries rint(partial sum * 127 / largest possible partial sum of the group).
void lut8_prepare(const float* x, int64_t first, int64_t last, int64_t, int group_size, uint8_t* codes,
                  float* scale, float* sum) {
    for (int64_t g = first; g < last; g++, x += group_size) {
        const float largest = largest_partial_sum(x, group_size);
        float unused;
        group_stats(x, group_size, &unused, &sum[g]);
        const bool zero = largest < kSmallestInput;
        const float inverse = zero ? 0.0f : 127.0f / largest;
        scale[g] = zero ? 0.0f : largest / 127.0f;
        for (int q = 0; q < group_size / 4; q++) {
            const float* a = x + 4 * q;
            uint8_t* const to = codes + (g * group_size / 4 + q) * 16;
            for (int i = 0; i < 16; i++) {
                float v = (i & 1 ? a[0] : -a[0]) + (i & 2 ? a[1] : -a[1]) + (i & 4 ? a[2] : -a[2]) +
                          (i & 8 ? a[3] : -a[3]);
                v = v * inverse;
                v = v > -127.0f ? v : -127.0f;
                v = v < 127.0f ? v : 127.0f;
                to[i] = static_cast<uint8_t>(static_cast<int32_t>(round_even(v)));
            }
        }
    }
}

// 16-bit entries, exact sums of 14-bit integers; per group the high bytes, then the low bytes.
void lut16_prepare(const float* x, int64_t first, int64_t last, int64_t, int group_size, uint8_t* codes,
                   float* scale, float* sum) {
    for (int64_t g = first; g < last; g++, x += group_size) {
        float largest;
        int32_t q[kMaxGroup];
        group_stats(x, group_size, &largest, &sum[g]);
        scale[g] = quantise(x, group_size, largest, kWideLimit, q);
        uint8_t* const high = codes + g * group_size * 8;
        for (int i = 0; i < group_size / 4; i++) {
            const int32_t* a = q + 4 * i;
            for (int e = 0; e < 16; e++) {
                const int32_t v = (e & 1 ? a[0] : -a[0]) + (e & 2 ? a[1] : -a[1]) + (e & 4 ? a[2] : -a[2]) +
                                  (e & 8 ? a[3] : -a[3]);
                high[i * 16 + e] = static_cast<uint8_t>(v >> 8);
                high[group_size * 4 + i * 16 + e] = static_cast<uint8_t>(v);
            }
        }
    }
}

INLINE __m256i table(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

INLINE __m256 load_half(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// 16-bit sums of 32 rows: rows 0-7 | 16-23 and 8-15 | 24-31.
struct Sums {
    __m256i first, second;
};

// Row octet i of the sums, in 32 bits.
template <bool kSigned>
INLINE __m256i octet(const Sums& s, int i) {
    const __m256i both = i % 2 ? s.second : s.first;
    const __m128i eight = i / 2 ? _mm256_extracti128_si256(both, 1) : _mm256_castsi256_si128(both);
    return kSigned ? _mm256_cvtepi16_epi32(eight) : _mm256_cvtepu16_epi32(eight);
}

// kSigned: int8 entries; else u8 (the low bytes of 16-bit ones).
template <bool kSigned>
INLINE void look_up(Sums& s, const uint8_t* tables, __m256i low, __m256i high) {
    const __m256i ones = _mm256_set1_epi8(1);
    const __m256i v0 = _mm256_shuffle_epi8(table(tables), low);
    const __m256i v1 = _mm256_shuffle_epi8(table(tables + 16), high);
    const __m256i a = _mm256_unpacklo_epi8(v0, v1), b = _mm256_unpackhi_epi8(v0, v1);
    s.first = _mm256_add_epi16(s.first, kSigned ? _mm256_maddubs_epi16(ones, a) : _mm256_maddubs_epi16(a, ones));
    s.second = _mm256_add_epi16(s.second, kSigned ? _mm256_maddubs_epi16(ones, b) : _mm256_maddubs_epi16(b, ones));
}

INLINE void twice(Sums& s) {
    s.first = _mm256_slli_epi16(s.first, 1);
    s.second = _mm256_slli_epi16(s.second, 1);
}

template <int kTokens, bool kGeometric, bool kWide>
void lut(const Matrix& w, int k, int64_t block, const Activation* x, float* out) {
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    const int gs = w.group_size, code_bytes = gs * (kWide ? 8 : 4);
    const int64_t stride = plane_stride(gs, kGeometric);
    const __m256 geometric_step = _mm256_set1_ps(1.0f / static_cast<float>(1 << (k - 1)));
    __m256 acc[kTokens][4];
    for (int m = 0; m < kTokens; m++) {
        for (int i = 0; i < 4; i++) acc[m][i] = _mm256_setzero_ps();
    }
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t at = block * w.groups + g;
        const uint8_t* const sides = w.sides + at * sides_stride(kGeometric);
        _mm_prefetch(reinterpret_cast<const char*>(sides + kAhead), _MM_HINT_T1);
        __m256 planes[kTokens][4];
        __m256i whole[kTokens][4];  // geometric: integer sums over the planes
        Sums high[kTokens], low[kTokens];
        for (int m = 0; m < kTokens; m++) {
            for (int i = 0; i < 4; i++) {
                planes[m][i] = _mm256_setzero_ps();
                whole[m][i] = _mm256_setzero_si256();
            }
        }
        int held = 0;  // planes in the 16-bit sums; three fit (7 * 32 * 255 < 2^16)
        for (int j = 0; j < k; j++) {
            const uint8_t* const bits = w.plane[j] + at * stride;
            for (int m = 0; m < kTokens; m++) {
                if (held == 0) high[m] = low[m] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
                if (held) twice(high[m]);
                if (held && kWide) twice(low[m]);
            }
            for (int c = 0; c < gs / 8; c++) {
                if (c & 1) _mm_prefetch(reinterpret_cast<const char*>(bits + 32 * c + kAhead), _MM_HINT_T1);
                const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + 32 * c));
                const __m256i i0 = _mm256_and_si256(b, nibble);
                const __m256i i1 = _mm256_and_si256(_mm256_srli_epi16(b, 4), nibble);
                for (int m = 0; m < kTokens; m++) {
                    const uint8_t* const tables = x[m].codes + g * code_bytes + c * 32;
                    look_up<true>(high[m], tables, i0, i1);
                    if (kWide) look_up<false>(low[m], tables + gs * 4, i0, i1);
                }
            }
            held++;
            if (kGeometric && held < 3 && j + 1 < k) continue;
            for (int m = 0; m < kTokens; m++) {
                for (int i = 0; i < 4; i++) {
                    __m256i dot = octet<true>(high[m], i);
                    if (kWide) dot = _mm256_add_epi32(_mm256_slli_epi32(dot, 8), octet<false>(low[m], i));
                    if (kGeometric) {
                        whole[m][i] = _mm256_add_epi32(_mm256_slli_epi32(whole[m][i], held), dot);
                    } else {
                        planes[m][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), load_half(bits + 4 * gs + 16 * i),
                                                       planes[m][i]);
                    }
                }
            }
            held = 0;
        }
        for (int i = 0; i < 4; i++) {
            const __m256 offset = load_half(sides + 16 * i);
            for (int m = 0; m < kTokens; m++) {
                if (kGeometric) {
                    planes[m][i] =
                        _mm256_mul_ps(_mm256_cvtepi32_ps(whole[m][i]),
                                      _mm256_mul_ps(load_half(sides + 2 * kRows + 16 * i), geometric_step));
                }
                acc[m][i] = _mm256_fmadd_ps(planes[m][i], _mm256_set1_ps(x[m].scale[g]), acc[m][i]);
                acc[m][i] = _mm256_fmadd_ps(offset, _mm256_set1_ps(x[m].sum[g]), acc[m][i]);
            }
        }
    }
    for (int m = 0; m < kTokens; m++) {
        for (int i = 0; i < 4; i++) _mm256_storeu_ps(out + m * kRows + 8 * i, acc[m][i]);
    }
}

template <bool kGeometric, bool kWide>
void lut_tokens(const Matrix& w, int k, int64_t block, const Activation* x, int tokens, float* out) {
    switch (tokens) {
        case 1: return lut<1, kGeometric, kWide>(w, k, block, x, out);
        case 2: return lut<2, kGeometric, kWide>(w, k, block, x, out);
        case 3: return lut<3, kGeometric, kWide>(w, k, block, x, out);
        default: return lut<4, kGeometric, kWide>(w, k, block, x, out);
    }
}

template <bool kWide>
void lut_multiply(const Matrix& w, int k, int64_t block, const Activation* x, int tokens, float* out) {
    if (w.geometric) return lut_tokens<true, kWide>(w, k, block, x, tokens, out);
    lut_tokens<false, kWide>(w, k, block, x, tokens, out);
}

constexpr Method kLut8 = {lut8_bytes, lut8_prepare, lut_multiply<false>, 4};
constexpr Method kLut16 = {lut16_bytes, lut16_prepare, lut_multiply<true>, 4};

constexpr Isa kAvx2 = {"avx2", kByColumn, {kLut8, kLut16}, {}, {}, silu_mul_16};

}  // namespace

const Isa* avx2_isa() noexcept {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")
               ? &kAvx2
               : nullptr;
}
