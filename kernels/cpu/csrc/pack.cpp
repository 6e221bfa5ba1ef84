// SPDX-License-Identifier: Apache-2.0
// Canonical planes -> the blocks of layout.h. A pure transposition of bytes; one thread owns one row
// block of one expert at a time.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "layout.h"

namespace {

// Canonical row of row `lane` of a block, or -1 past the end. `gated`: gate rows, then up rows.
int64_t source_row(int64_t block, int lane, int64_t rows, bool gated) {
    if (!gated) {
        const int64_t row = block * kRows + lane;
        return row < rows ? row : -1;
    }
    const int64_t row = block * kHalf + lane % kHalf, half = rows / 2;
    return row < half ? row + (lane < kHalf ? 0 : half) : -1;
}

int64_t count_blocks(int64_t rows, bool gated) {
    return gated ? (rows / 2 + kHalf - 1) / kHalf : (rows + kRows - 1) / kRows;
}

// One lane's bytes of one group into the block. `bytes` has room for a whole group, zeros past its end.
void put_bits(const uint8_t* bytes, int lane, BitOrder order, int group_size, uint8_t* block) {
    if (order == kByColumn) {
        for (int c = 0; c < group_size / 8; c++) block[c * kRows + lane] = bytes[c];
        return;
    }
    uint8_t* const to = block + (lane / kHalf) * 2 * group_size + (lane % kHalf) * 4;
    for (int c = 0; c < group_size / 32; c++) memcpy(to + c * 64, bytes + c * 4, 4);
}

}  // namespace

VLLM_DPA_API int64_t vllm_dpa_plane_bytes(int64_t rows, int64_t columns, int64_t group_size, int32_t gated,
                                          int32_t geometric) {
    const int64_t groups = (columns + group_size - 1) / group_size;
    return count_blocks(rows, gated) * groups * plane_stride(group_size, geometric);
}

VLLM_DPA_API int64_t vllm_dpa_sides_bytes(int64_t rows, int64_t columns, int64_t group_size, int32_t gated,
                                          int32_t geometric) {
    const int64_t groups = (columns + group_size - 1) / group_size;
    return count_blocks(rows, gated) * groups * sides_stride(geometric);
}

VLLM_DPA_API void vllm_dpa_pack_plane(const char* isa, const uint8_t* plane, const uint16_t* scale, int64_t experts,
                                      int64_t rows, int64_t columns, int64_t group_size, int32_t gated,
                                      uint8_t* out) {
    const BitOrder order = find_isa(isa)->order;
    const bool geometric = !scale;
    const int64_t groups = (columns + group_size - 1) / group_size, row_bytes = (columns + 7) / 8;
    const int64_t blocks = count_blocks(rows, gated), stride = plane_stride(group_size, geometric);
    // Bits past the last column are 0 on disk by the format; cleared here, so that nothing depends on it.
    const uint8_t last_mask = columns % 8 ? (1u << columns % 8) - 1 : 0xff;
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < experts * blocks; item++) {
        const int64_t expert = item / blocks, block = item % blocks;
        uint8_t* const to = out + item * groups * stride;
        memset(to, 0, groups * stride);
        for (int lane = 0; lane < kRows; lane++) {
            const int64_t row = source_row(block, lane, rows, gated);
            if (row < 0) continue;
            const uint8_t* from = plane + (expert * rows + row) * row_bytes;
            for (int64_t g = 0; g < groups; g++) {
                const int64_t at = g * group_size / 8, left = row_bytes - at;
                const uint8_t* bytes = from + at;
                uint8_t last[kMaxGroup / 8] = {};
                if (left <= group_size / 8) {
                    memcpy(last, bytes, left);
                    last[left - 1] &= last_mask;
                    bytes = last;
                }
                put_bits(bytes, lane, order, group_size, to + g * stride);
                if (scale) {
                    memcpy(to + g * stride + 4 * group_size + 2 * lane, scale + (expert * rows + row) * groups + g, 2);
                }
            }
        }
    }
}

VLLM_DPA_API void vllm_dpa_pack_sides(const uint16_t* offset, const uint16_t* scale, int64_t experts, int64_t rows,
                                      int64_t groups, int32_t gated, uint8_t* out) {
    const int64_t blocks = count_blocks(rows, gated), stride = sides_stride(scale);
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < experts * blocks; item++) {
        const int64_t expert = item / blocks, block = item % blocks;
        for (int lane = 0; lane < kRows; lane++) {
            const int64_t row = source_row(block, lane, rows, gated);
            for (int64_t g = 0; g < groups; g++) {
                uint8_t* const to = out + (item * groups + g) * stride + 2 * lane;
                const int64_t from = (expert * rows + row) * groups + g;
                memset(to, 0, 2);
                if (row >= 0) memcpy(to, offset + from, 2);
                if (!scale) continue;
                memset(to + 2 * kRows, 0, 2);
                if (row >= 0) memcpy(to + 2 * kRows, scale + from, 2);
            }
        }
    }
}
