// SPDX-License-Identifier: Apache-2.0
// Expert weights as the kernels read them, and the interface that an instruction set implements.
//
// Rows go in blocks of 32. In w13 a block is 16 gate rows and the 16 up rows that belong to them, so
// that SiLU(gate) * up needs one block alone; in w2 it is 32 output rows. Missing rows and columns are
// zero bits with zero scale and offset.
//
//   plane j  [expert][block][group][4 * group_size bytes of bits, then per_chunk: fp16 scale[32]]
//   sides    [expert][block][group][fp16 offset[32], then geometric: fp16 scale[32]]
//
// One stream per plane, and a plane is a buffer of its own. The bits of a (block, group) come in the
// order that the instruction set likes:
//   kByRow     [half][group_size / 32][16 rows][4 bytes]: a dword is 32 columns of a row
//   kByColumn  [group_size / 8][32 rows][1 byte]: a byte lane is a row
// In both a byte is the canonical byte: bit i of byte c is column 8c + i.
//
// Everything here is static or plain data: the files built for one instruction set must not emit a
// shared inline function that the linker could then use in the others.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int kRows = 32;
constexpr int kHalf = 16;
constexpr int kMaxChunks = 8;
constexpr int kTiers = 9;
constexpr int kMaxGroup = 128;

enum BitOrder { kByRow, kByColumn };

// One matrix of one expert.
struct Matrix {
    const uint8_t* plane[kMaxChunks];
    const uint8_t* sides;
    int64_t groups;
    int group_size;
    bool geometric;
};

static inline int64_t plane_stride(int group_size, bool geometric) {
    return 4 * group_size + (geometric ? 0 : 2 * kRows);
}

static inline int64_t sides_stride(bool geometric) { return 2 * kRows * (geometric ? 2 : 1); }

// One token's input to a matrix, in the form that a Method's prepare() made. scale and sum have one
// value per group: what an integer code is worth, and the sum of the unrounded inputs.
struct Activation {
    const uint8_t* codes;
    const float* scale;
    const float* sum;
};

// One way to multiply a row block by activations.
struct Method {
    // Bytes of one token's codes, a multiple of 64.
    int64_t (*code_bytes)(int64_t groups, int group_size);
    // Codes, scale and sum of groups [first, last) of an input x that starts at group `first`.
    void (*prepare)(const float* x, int64_t first, int64_t last, int64_t groups, int group_size, uint8_t* codes,
                    float* scale, float* sum);
    // out[token][32] = rows of `block` at tier k times each of `tokens` activations, gain left out. The
    // codes of consecutive tokens are one stride apart, and 15 strides past the last may be read.
    void (*multiply)(const Matrix& w, int k, int64_t block, const Activation* x, int tokens, float* out);
    // Most tokens of one multiply().
    int max_tokens;
};

enum Precision { kInt8, kInt16, kPrecisions };

// What one instruction set offers: one method or both. `lut` looks partial sums up in tables made per
// token and suits few tokens; `tile` decodes a block once for many. Where there are both, the first token
// count for which the tile is faster is tile_from[precision][geometric][k].
struct Isa {
    const char* name;
    BitOrder order;
    Method lut[kPrecisions];
    Method tile[kPrecisions];
    int16_t tile_from[kPrecisions][2][kTiers];
    // out[i] = silu(gate[i] * gate_gain) * (up[i] * up_gain), i < 16
    void (*silu_mul)(const float* gate, const float* up, float gate_gain, float up_gain, float* out);
};

const Isa* portable_isa() noexcept;
#ifdef VLLM_DPA_X86
const Isa* avx2_isa() noexcept;    // null where the processor lacks it
const Isa* avx512_isa() noexcept;  // likewise
const Isa* amx_isa() noexcept;     // likewise
#endif

// By name; null or empty: the best that the processor has. Null if unknown or not available.
const Isa* find_isa(const char* name);
