// SPDX-License-Identifier: Apache-2.0
// Arithmetic written once, without intrinsics, for the compiler to vectorise with the flags of the file
// that includes it. All static, see layout.h.
#pragma once

#include <cstdint>
#include <cstring>

// Round half to even; |v| < 2^22. (1.5 * 2^23: the sum has no fraction bits left.)
static inline float round_even(float v) { return (v + 12582912.0f) - 12582912.0f; }

static inline float half_to_float(uint16_t h) {
    const uint32_t magnitude = h & 0x7fffu;
    uint32_t bits;
    float f;
    if (magnitude >= 0x7c00) {  // Inf, NaN
        bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
        memcpy(&f, &bits, 4);
    } else {
        // Exponent rebiased by a multiplication, which also makes denormals right.
        bits = magnitude << 13;
        memcpy(&f, &bits, 4);
        f *= 5.192296858534828e33f;  // 2^112
    }
    return h & 0x8000u ? -f : f;
}

// exp to about 1e-7 relative, clamped to the normal range; NaN stays NaN (Cephes' reduction by ln 2 in
// two parts, Taylor polynomial of degree 7 on |f| <= ln(2) / 2).
static inline float plain_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = round_even(x * 1.44269504f);
    const float f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * f + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    // 2^n through the exponent bits; n + 2^23 * 1.5 has n in its low bits.
    const float shifted = n + 12582912.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static inline void silu_mul_16(const float* gate, const float* up, float gate_gain, float up_gain, float* out) {
    for (int i = 0; i < 16; i++) {
        const float g = gate[i] * gate_gain;
        out[i] = g / (1.0f + plain_exp(-g)) * (up[i] * up_gain);
    }
}

// Largest magnitude and sum of x[0..n), n a multiple of 16. NaN and Inf reach the sum.
static inline void group_stats(const float* x, int n, float* largest, float* sum) {
    float max16[16] = {}, sum16[16] = {};
    for (int i = 0; i < n; i += 16) {
        for (int l = 0; l < 16; l++) {
            const float v = x[i + l], a = v < 0 ? -v : v;
            max16[l] = a > max16[l] ? a : max16[l];
            sum16[l] += v;
        }
    }
    for (int step = 8; step; step /= 2) {
        for (int l = 0; l < step; l++) {
            max16[l] = max16[l + step] > max16[l] ? max16[l + step] : max16[l];
            sum16[l] += sum16[l + step];
        }
    }
    *largest = max16[0];
    *sum = sum16[0];
}

// Inputs below this are zero to an integer code (their reciprocal would overflow); sums keep them.
constexpr float kSmallestInput = 1e-30f;

// q[i] = rint(x[i] / scale), |q| <= limit; returns the scale. Never undefined: NaN becomes -limit.
static inline float quantise(const float* x, int n, float largest, float limit, int32_t* q) {
    const bool zero = largest < kSmallestInput;
    const float inverse = zero ? 0.0f : limit / largest;
    for (int i = 0; i < n; i++) {
        float v = x[i] * inverse;
        v = v > -limit ? v : -limit;
        v = v < limit ? v : limit;
        q[i] = static_cast<int32_t>(round_even(zero ? 0.0f : v));
    }
    return zero ? 0.0f : largest / limit;
}

// 16-bit activations are 14-bit integers: four of them add up to a 16-bit table entry, and a group of
// 128 times 12-bit weights fits 32 bits (8191 * 2047 * 128 < 2^31).
constexpr float kWideLimit = 8191.0f;
constexpr int kWideWeight = 2047;
