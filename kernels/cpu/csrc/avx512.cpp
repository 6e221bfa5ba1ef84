// SPDX-License-Identifier: Apache-2.0
// AVX512 with VNNI and VBMI.
//
// lut: for 4 columns there are 16 sign patterns, so a table of 16 partial sums per 4 activations turns
// four 1-bit weights into one byte lookup (T-MAC, arXiv 2407.00088). A zmm of bits is 16 rows x 32
// columns; its low and high nibbles index two zmm of four tables each (vpermb), and vpdpbusd adds a
// row's four bytes. A geometric plane's weight 2^(k-1-j) is the other factor of that vpdpbusd.
// tile: a (block, group) is decoded to u8 once and multiplied by int8 activations of many tokens.
#include <immintrin.h>

#include "avx512_tile.h"
#include "layout.h"
#include "lut_tables.h"
#include "plain_math.h"

namespace {

// ---- lut ----------------------------------------------------------------------------------------------

// Tables of quad q (columns 4q..4q+3 of the group): dword q/8, byte lane (q%8)/2, nibble q%2.
INLINE int table_at(int q) { return ((q / 8 * 2 + q % 2) * 4 + q % 8 / 2) * 16; }

// int8 entries: rint(partial sum * 127 / largest possible partial sum of the group).
void lut8_prepare(const float* x, int64_t first, int64_t last, int64_t, int group_size, uint8_t* codes,
                  float* scale, float* sum) {
    const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-1.0f);
    const __m512 s0 = _mm512_mask_mov_ps(minus, 0xAAAA, one), s1 = _mm512_mask_mov_ps(minus, 0xCCCC, one);
    const __m512 s2 = _mm512_mask_mov_ps(minus, 0xF0F0, one), s3 = _mm512_mask_mov_ps(minus, 0xFF00, one);
    for (int64_t g = first; g < last; g++, x += group_size) {
        const float largest = largest_partial_sum(x, group_size);
        float unused;
        group_stats(x, group_size, &unused, &sum[g]);
        const bool zero = largest < kSmallestInput;
        scale[g] = zero ? 0.0f : largest / 127.0f;
        const __m512 inverse = _mm512_set1_ps(zero ? 0.0f : 127.0f / largest);
        uint8_t* const to = codes + g * group_size * 4;
        for (int q = 0; q < group_size / 4; q++) {
            const float* a = x + 4 * q;
            __m512 t = _mm512_mul_ps(s0, _mm512_set1_ps(a[0]));
            t = _mm512_fmadd_ps(s1, _mm512_set1_ps(a[1]), t);
            t = _mm512_fmadd_ps(s2, _mm512_set1_ps(a[2]), t);
            t = _mm512_fmadd_ps(s3, _mm512_set1_ps(a[3]), t);
            const __m512i entry = _mm512_cvtps_epi32(_mm512_mul_ps(t, inverse));
            _mm_store_si128(reinterpret_cast<__m128i*>(to + table_at(q)), _mm512_cvtsepi32_epi8(entry));
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
        uint8_t* const low = high + group_size * 4;
        for (int i = 0; i < group_size / 4; i++) {
            const int32_t* a = q + 4 * i;
            __m512i entry = _mm512_set1_epi32(-(a[0] + a[1] + a[2] + a[3]));
            entry = _mm512_mask_add_epi32(entry, 0xAAAA, entry, _mm512_set1_epi32(2 * a[0]));
            entry = _mm512_mask_add_epi32(entry, 0xCCCC, entry, _mm512_set1_epi32(2 * a[1]));
            entry = _mm512_mask_add_epi32(entry, 0xF0F0, entry, _mm512_set1_epi32(2 * a[2]));
            entry = _mm512_mask_add_epi32(entry, 0xFF00, entry, _mm512_set1_epi32(2 * a[3]));
            _mm_store_si128(reinterpret_cast<__m128i*>(high + table_at(i)),
                            _mm512_cvtepi32_epi8(_mm512_srai_epi32(entry, 8)));
            _mm_store_si128(reinterpret_cast<__m128i*>(low + table_at(i)), _mm512_cvtepi32_epi8(entry));
        }
    }
}

// kDwords: group_size / 32. kWide: 16-bit tables. A row's sum over its planes is the same arithmetic in
// the same order for any kTokens.
template <int kDwords, int kTokens, bool kGeometric, bool kWide>
void lut(const Matrix& w, int k, int64_t block, const Activation* x, float* out) {
    constexpr int kTables = 2 * kDwords, kCodes = kTables * 64 * (kWide ? 2 : 1);
    constexpr int kHalfBytes = 64 * kDwords, kScales = 2 * kHalfBytes;
    constexpr int kStride = kScales + (kGeometric ? 0 : 2 * kRows), kSides = 2 * kRows * (kGeometric ? 2 : 1);
    const __m512i nibble = _mm512_set1_epi8(0x0f), lane = _mm512_set1_epi32(0x30201000);
    const __m512i ones = _mm512_set1_epi8(1);
    const float geometric_step = 1.0f / static_cast<float>(1 << (k - 1));
    __m512 acc[2][kTokens];
    for (int n = 0; n < 2; n++) {
        for (int m = 0; m < kTokens; m++) acc[n][m] = _mm512_setzero_ps();
    }
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t at = block * w.groups + g;
        const uint8_t* const sides = w.sides + at * kSides;
        prefetch(sides, kSides);
        __m512i high[kTables], low[kTables];  // of the only token, else read where they are used
        if (kTokens == 1) {
            for (int i = 0; i < kTables; i++) {
                high[i] = _mm512_load_si512(x[0].codes + g * kCodes + i * 64);
                if (kWide) low[i] = _mm512_load_si512(x[0].codes + g * kCodes + (kTables + i) * 64);
            }
        }
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            __m512 planes[kTokens];
            __m512i whole[kTokens][2], part[kTokens][2];  // high and low bytes, two chains each
            for (int m = 0; m < kTokens; m++) {
                planes[m] = _mm512_setzero_ps();
                for (int c = 0; c < 2; c++) whole[m][c] = part[m][c] = _mm512_setzero_si512();
            }
            for (int j = 0; j < k; j++) {
                const uint8_t* const block_bits = w.plane[j] + at * kStride;
                const uint8_t* const bits = block_bits + n * kHalfBytes;
                prefetch(bits, kHalfBytes);
                if (!kGeometric && n) prefetch(bits + kHalfBytes, 64);
                __m512i index[kTables];
                for (int c = 0; c < kDwords; c++) {
                    const __m512i b = _mm512_loadu_si512(bits + 64 * c);
                    index[2 * c] = _mm512_ternarylogic_epi32(b, nibble, lane, 0xEA);  // (b & nibble) | lane
                    index[2 * c + 1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(b, 4), nibble, lane, 0xEA);
                }
                // -128 fits the signed factor of the low bytes and 128 does not: they are summed negated.
                const int power = kGeometric ? 1 << (k - 1 - j) : 1;
                const __m512i plus = kGeometric ? _mm512_set1_epi8(static_cast<char>(power)) : ones;
                const __m512i minus = _mm512_set1_epi8(static_cast<char>(-power));
                for (int m = 0; m < kTokens; m++) {
                    const uint8_t* const codes = x[m].codes + g * kCodes;
                    for (int i = 0; i < kTables; i++) {
                        const __m512i t = kTokens == 1 ? high[i] : _mm512_load_si512(codes + i * 64);
                        whole[m][i % 2] =
                            _mm512_dpbusd_epi32(whole[m][i % 2], plus, _mm512_permutexvar_epi8(index[i], t));
                        if (!kWide) continue;
                        const __m512i u = kTokens == 1 ? low[i] : _mm512_load_si512(codes + (kTables + i) * 64);
                        part[m][i % 2] =
                            _mm512_dpbusd_epi32(part[m][i % 2], _mm512_permutexvar_epi8(index[i], u), minus);
                    }
                    if (kGeometric) continue;
                    __m512i dot = _mm512_add_epi32(whole[m][0], whole[m][1]);
                    if (kWide) {
                        dot = _mm512_sub_epi32(_mm512_slli_epi32(dot, 8), _mm512_add_epi32(part[m][0], part[m][1]));
                    }
                    planes[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), load_half(block_bits + kScales + 32 * n),
                                                planes[m]);
                    for (int c = 0; c < 2; c++) whole[m][c] = part[m][c] = _mm512_setzero_si512();
                }
            }
            const __m512 offset = load_half(sides + 32 * n);
            for (int m = 0; m < kTokens; m++) {
                if (kGeometric) {
                    __m512i dot = _mm512_add_epi32(whole[m][0], whole[m][1]);
                    if (kWide) {
                        dot = _mm512_sub_epi32(_mm512_slli_epi32(dot, 8), _mm512_add_epi32(part[m][0], part[m][1]));
                    }
                    const __m512 step =
                        _mm512_mul_ps(load_half(sides + 2 * kRows + 32 * n), _mm512_set1_ps(geometric_step));
                    planes[m] = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), step);
                }
                acc[n][m] = _mm512_fmadd_ps(planes[m], _mm512_set1_ps(x[m].scale[g]), acc[n][m]);
                acc[n][m] = _mm512_fmadd_ps(offset, _mm512_set1_ps(x[m].sum[g]), acc[n][m]);
            }
        }
    }
    for (int m = 0; m < kTokens; m++) {
        for (int n = 0; n < 2; n++) _mm512_storeu_ps(out + m * kRows + n * kHalf, acc[n][m]);
    }
}

template <int kDwords, bool kGeometric, bool kWide>
void lut_tokens(const Matrix& w, int k, int64_t block, const Activation* x, int tokens, float* out) {
    switch (tokens) {
        case 1: return lut<kDwords, 1, kGeometric, kWide>(w, k, block, x, out);
        case 2: return lut<kDwords, 2, kGeometric, kWide>(w, k, block, x, out);
        case 3: return lut<kDwords, 3, kGeometric, kWide>(w, k, block, x, out);
        default: return lut<kDwords, 4, kGeometric, kWide>(w, k, block, x, out);
    }
}

template <bool kWide>
void lut_multiply(const Matrix& w, int k, int64_t block, const Activation* x, int tokens, float* out) {
    const int dwords = w.group_size / 32;
    if (w.geometric) {
        if (dwords == 4) return lut_tokens<4, true, kWide>(w, k, block, x, tokens, out);
        if (dwords == 2) return lut_tokens<2, true, kWide>(w, k, block, x, tokens, out);
        return lut_tokens<1, true, kWide>(w, k, block, x, tokens, out);
    }
    if (dwords == 4) return lut_tokens<4, false, kWide>(w, k, block, x, tokens, out);
    if (dwords == 2) return lut_tokens<2, false, kWide>(w, k, block, x, tokens, out);
    return lut_tokens<1, false, kWide>(w, k, block, x, tokens, out);
}

// ---- tile ---------------------------------------------------------------------------------------------

// Adds one group of kTokens tokens times a decoded block to out.
template <int kTokens>
INLINE void tile_dot(const uint8_t* tile, const HalfTile half[2], float centre, const Activation* x, int64_t groups,
                     int group_size, int64_t g, float* out) {
    __m512i dot[2][kTokens];
    for (int n = 0; n < 2; n++) {
        for (int m = 0; m < kTokens; m++) dot[n][m] = _mm512_setzero_si512();
    }
    for (int i = 0; i < group_size / 4; i++) {
        const __m512i w0 = _mm512_load_si512(tile + i * 64);
        const __m512i w1 = _mm512_load_si512(tile + 16 * group_size + i * 64);
#pragma GCC unroll 8
        for (int m = 0; m < kTokens; m++) {
            int32_t four;
            memcpy(&four, x[m].codes + g * group_size + i * 4, 4);
            const __m512i a = _mm512_set1_epi32(four);
            dot[0][m] = _mm512_dpbusd_epi32(dot[0][m], w0, a);
            dot[1][m] = _mm512_dpbusd_epi32(dot[1][m], w1, a);
        }
    }
    for (int m = 0; m < kTokens; m++) {
        const GroupOfToken token = group_of_token(x[m], groups, group_size, g, centre);
        for (int n = 0; n < 2; n++) add_half(dot[n][m], token, half[n], out + m * kRows + n * kHalf);
    }
}

void tile_multiply(const Matrix& w, int k, int64_t block, const Activation* x, int tokens, float* out) {
    alignas(64) uint8_t tile[kMaxGroup * kRows];
    memset(out, 0, sizeof(float) * kRows * tokens);
    const float centre = tile_centre(w, k);
    const int gs = w.group_size;
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t at = block * w.groups + g;
        const HalfTile half[2] = {decode_half(w, k, at, 0, tile), decode_half(w, k, at, 1, tile + 16 * gs)};
        int t = 0;
        for (; t + 8 <= tokens; t += 8) tile_dot<8>(tile, half, centre, x + t, w.groups, gs, g, out + t * kRows);
        const Activation* const rest = x + t;
        float* const to = out + t * kRows;
        switch (tokens - t) {
            case 1: tile_dot<1>(tile, half, centre, rest, w.groups, gs, g, to); break;
            case 2: tile_dot<2>(tile, half, centre, rest, w.groups, gs, g, to); break;
            case 3: tile_dot<3>(tile, half, centre, rest, w.groups, gs, g, to); break;
            case 4: tile_dot<4>(tile, half, centre, rest, w.groups, gs, g, to); break;
            case 5: tile_dot<5>(tile, half, centre, rest, w.groups, gs, g, to); break;
            case 6: tile_dot<6>(tile, half, centre, rest, w.groups, gs, g, to); break;
            case 7: tile_dot<7>(tile, half, centre, rest, w.groups, gs, g, to); break;
            default: break;
        }
    }
}

constexpr int16_t kNo = 0x7fff;
constexpr Method kLut8 = {lut8_bytes, lut8_prepare, lut_multiply<false>, 4};
constexpr Method kLut16 = {lut16_bytes, lut16_prepare, lut_multiply<true>, 4};
constexpr Method kTile8 = {tile_bytes, tile_prepare, tile_multiply, 1 << 30};

// tile_from as measured by `vllm-dpa bench cpu --shapes all-experts --path lut` and `--path tile`. There
// is no tile for 16-bit activations.
constexpr Isa kAvx512 = {
    "avx512",
    kByRow,
    {kLut8, kLut16},
    {kTile8, {}},
    {{{kNo, kNo, kNo, 24, 12, 8, 6, 5, 5}, {kNo, kNo, kNo, 16, 8, 6, 5, 5, 4}}, {}},
    silu_mul_16,
};

}  // namespace

const Isa* avx512_isa() noexcept {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni")
               ? &kAvx512
               : nullptr;
}
