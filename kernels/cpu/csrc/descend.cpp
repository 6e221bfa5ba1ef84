// SPDX-License-Identifier: Apache-2.0
//
// The code step of the encoder's coordinate descent: for every row of a block of columns, one column
// after the other, the 8-bit code that minimises
//
//     sum_k w_k (H_jj d_k^2 + 2 d_k g_k),   d_k = decode_k(code) - W_j,   k = 2..8
//
// exactly, where g_k is the gradient that the errors of all other columns leave on column j. With
// delta = offset - W_j and decode_k = offset + a_k(code), the cost of a code is, up to a constant,
//
//     H_jj q(code) + sum_p b_p t_p,   q = sum_k w_k a_k^2,
//     t_p = 2 s_p sum_{k > p} w_k (g_k + H_jj delta)
//
// so it is one multiply-add per code once the sums over the two halves of the bits are tabulated.
#include <cstdint>

#include "kernels.h"

// The same source for wider vectors, chosen when the library is loaded. Plain loops without contraction: the
// result does not depend on the choice. Not under the address sanitizer: the choice is made before it is ready.
#if defined(VLLM_DPA_X86) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
#define VLLM_DPA_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VLLM_DPA_CLONES
#endif

namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int kChunks = 8;
constexpr int kTiers = 7;  // tiers 2..8
constexpr int kLanes = 16;

// q of all 256 codes, plane 0 in the top bit.
INLINE void square_table(const float* scale, const float* weight, float* square) {
    for (int code = 0; code < 256; ++code) {
        float value = 0, total = 0;
        for (int p = 0; p < kChunks; ++p) {
            value += (code >> (kChunks - 1 - p)) & 1 ? scale[p] : -scale[p];
            total += weight[p + 1] * value * value;
        }
        square[code] = total;
    }
}

// Sums of +-t over four planes, the first of them in the top bit.
INLINE void half_table(const float* t, float* sums) {
    for (int code = 0; code < kLanes; ++code) {
        float total = 0;
        for (int p = 0; p < 4; ++p) total += (code >> (3 - p)) & 1 ? t[p] : -t[p];
        sums[code] = total;
    }
}

// The cheapest code; of equally cheap ones the smallest high half, then the smallest low half.
INLINE int cheapest(float curvature, const float* square, const float* t) {
    float high[kLanes], low[kLanes], best[kLanes];
    int32_t index[kLanes];
    half_table(t, high);
    half_table(t + 4, low);
    for (int l = 0; l < kLanes; ++l) {
        best[l] = curvature * square[l] + (high[0] + low[l]);
        index[l] = l;
    }
    for (int h = 1; h < kLanes; ++h) {
        for (int l = 0; l < kLanes; ++l) {
            const float cost = curvature * square[h * kLanes + l] + (high[h] + low[l]);
            index[l] = cost < best[l] ? h * kLanes + l : index[l];
            best[l] = cost < best[l] ? cost : best[l];
        }
    }
    int winner = 0;
    for (int l = 1; l < kLanes; ++l)
        if (best[l] < best[winner] || (best[l] == best[winner] && index[l] < index[winner])) winner = l;
    return index[winner];
}

struct Row {
    const float* target;    // [columns]
    const float* scale;     // [8]
    float offset;
    uint8_t* codes;         // [columns]
    float* error;           // [7, columns]
    float* gradient;        // [7, columns]
};

INLINE void descend_row(const Row& row, const float* hessian, const float* weight, int columns) {
    float square[256];
    square_table(row.scale, weight, square);
    for (int j = 0; j < columns; ++j) {
        const float* coupling = hessian + int64_t(j) * columns;
        const float curvature = coupling[j];
        const float delta = row.offset - row.target[j];
        float t[kChunks], tail = 0;
        for (int k = kTiers - 1; k >= 0; --k) {
            const float other = row.gradient[k * columns + j] - row.error[k * columns + j] * curvature;
            tail += weight[k + 2] * (other + curvature * delta);
            t[k + 1] = 2 * row.scale[k + 1] * tail;
        }
        t[0] = 2 * row.scale[0] * tail;
        const int code = cheapest(curvature, square, t);
        if (code == row.codes[j]) continue;
        row.codes[j] = uint8_t(code);
        float value = delta;
        for (int p = 0; p < kChunks; ++p) {
            value += (code >> (kChunks - 1 - p)) & 1 ? row.scale[p] : -row.scale[p];
            if (p == 0) continue;
            float* error = row.error + (p - 1) * columns;
            float* gradient = row.gradient + (p - 1) * columns;
            const float change = value - error[j];
            error[j] = value;
            for (int i = j + 1; i < columns; ++i) gradient[i] += change * coupling[i];
        }
    }
}

}  // namespace

VLLM_DPA_CLONES void vllm_dpa_descend(const float* target, const float* hessian, const float* scale,
                                      const float* offset, const float* weight, uint8_t* codes, float* error,
                                      float* gradient, int64_t rows, int64_t columns) {
    for (int64_t n = 0; n < rows; ++n) {
        const int64_t first = n * columns;
        descend_row({target + first, scale + n * kChunks, offset[n], codes + first,
                     error + kTiers * first, gradient + kTiers * first},
                    hessian, weight, int(columns));
    }
}
