// SPDX-License-Identifier: Apache-2.0
// What the look-up tables of all instruction sets have in common: 16 entries per 4 columns, of one byte or
// of two. Static, see layout.h.
#pragma once

#include <cstdint>

static inline int64_t lut8_bytes(int64_t groups, int group_size) { return groups * group_size * 4; }
static inline int64_t lut16_bytes(int64_t groups, int group_size) { return groups * group_size * 8; }

// Largest magnitude that an entry of the group's tables can have; n is a multiple of 4.
static inline float largest_partial_sum(const float* x, int n) {
    float largest = 0;
    for (int q = 0; q < n; q += 4) {
        const float l = __builtin_fabsf(x[q]) + __builtin_fabsf(x[q + 1]) + __builtin_fabsf(x[q + 2]) +
                        __builtin_fabsf(x[q + 3]);
        largest = l > largest ? l : largest;
    }
    return largest;
}
