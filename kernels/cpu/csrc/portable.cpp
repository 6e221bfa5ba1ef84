// SPDX-License-Identifier: Apache-2.0
// The kernel in plain C++, for any processor: a tile alone, whatever the precision asked for. It decodes a
// (block, group) to 16-bit integers and multiplies those by 14-bit activations.
#include "layout.h"
#include "plain_math.h"

namespace {

int64_t code_bytes(int64_t groups, int group_size) { return groups * group_size * 2; }

void prepare(const float* x, int64_t first, int64_t last, int64_t, int group_size, uint8_t* codes, float* scale,
             float* sum) {
    for (int64_t g = first; g < last; g++, x += group_size) {
        float largest;
        int32_t q[kMaxGroup];
        group_stats(x, group_size, &largest, &sum[g]);
        scale[g] = quantise(x, group_size, largest, kWideLimit, q);
        int16_t* to = reinterpret_cast<int16_t*>(codes) + g * group_size;
        for (int i = 0; i < group_size; i++) to[i] = static_cast<int16_t>(q[i]);
    }
}

// Integer weight of each plane and what one unit is worth, per row.
void plane_weights(const Matrix& w, int k, int64_t at, const uint16_t* sides, int16_t weight[kMaxChunks][kRows],
                   float step[kRows]) {
    for (int r = 0; r < kRows; r++) {
        if (w.geometric) {
            for (int j = 0; j < k; j++) weight[j][r] = static_cast<int16_t>(1 << (k - 1 - j));
            step[r] = half_to_float(sides[kRows + r]) / static_cast<float>(1 << (k - 1));
            continue;
        }
        float scale[kMaxChunks], total = 0;
        for (int j = 0; j < k; j++) {
            uint16_t bits;
            memcpy(&bits, w.plane[j] + at * plane_stride(w.group_size, false) + 4 * w.group_size + 2 * r, 2);
            total += scale[j] = half_to_float(bits);
        }
        step[r] = total / kWideWeight;
        // Rounded from the small end in running sums, so that they add up to the limit exactly.
        const float inverse = total > 0 ? kWideWeight / total : 0.0f;
        float running = 0, before = 0;
        for (int j = k - 1; j >= 0; j--) {
            running += scale[j] * inverse;
            const float rounded = round_even(running);
            weight[j][r] = static_cast<int16_t>(rounded - before);
            before = rounded;
        }
    }
}

void multiply(const Matrix& w, int k, int64_t block, const Activation* x, int tokens, float* out) {
    memset(out, 0, sizeof(float) * kRows * tokens);
    int16_t tile[kMaxGroup][kRows], weight[kMaxChunks][kRows];
    float step[kRows];
    const int64_t stride = plane_stride(w.group_size, w.geometric);
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t at = block * w.groups + g;
        uint16_t sides[2 * kRows] = {};
        memcpy(sides, w.sides + at * sides_stride(w.geometric), sides_stride(w.geometric));
        plane_weights(w, k, at, sides, weight, step);
        for (int c = 0; c < w.group_size; c++) {
            for (int r = 0; r < kRows; r++) tile[c][r] = 0;
            for (int j = 0; j < k; j++) {
                const uint8_t* bits = w.plane[j] + at * stride + c / 8 * kRows;
                for (int r = 0; r < kRows; r++) {
                    const int16_t sign = static_cast<int16_t>((bits[r] >> (c % 8) & 1) * 2 - 1);
                    tile[c][r] = static_cast<int16_t>(tile[c][r] + sign * weight[j][r]);
                }
            }
        }
        for (int t = 0; t < tokens; t++) {
            const int16_t* q = reinterpret_cast<const int16_t*>(x[t].codes) + g * w.group_size;
            int32_t dot[kRows] = {};
            for (int c = 0; c < w.group_size; c++) {
                for (int r = 0; r < kRows; r++) dot[r] += tile[c][r] * q[c];
            }
            const float scale = x[t].scale[g], sum = x[t].sum[g];
            float* to = out + t * kRows;
            for (int r = 0; r < kRows; r++) {
                to[r] += static_cast<float>(dot[r]) * scale * step[r];
                to[r] += half_to_float(sides[r]) * sum;
            }
        }
    }
}

constexpr Method kTile = {code_bytes, prepare, multiply, 1 << 30};
constexpr Isa kPortable = {"portable", kByColumn, {}, {kTile, kTile}, {}, silu_mul_16};

}  // namespace

const Isa* portable_isa() noexcept { return &kPortable; }
