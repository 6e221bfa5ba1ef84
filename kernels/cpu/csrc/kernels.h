// SPDX-License-Identifier: Apache-2.0
// C functions of the extension, called from kernels/cpu/native.py through ctypes. Shapes are row-major
// and contiguous; the Python side has checked them.
#pragma once

#include <cstdint>

#define VLLM_DPA_API extern "C" __attribute__((visibility("default")))

// Changes whenever a signature below does; native.py refuses a module built from other sources.
constexpr int kInterfaceVersion = 4;

VLLM_DPA_API int vllm_dpa_interface_version();

// Exact multi-choice knapsack, row by row; defined in kernels/reference.py, which it matches bit for bit.
//   cost    float [rows, items, choices], k = min_chunks + choice
//   active  uint8 [rows, items]; inactive items get 0
//   budget  int64 [rows], one that the row's active items can meet
//   counts  int64 [rows, items], out
VLLM_DPA_API void vllm_dpa_knapsack(const float* cost, const uint8_t* active, const int64_t* budget,
                                    int64_t rows, int64_t items, int64_t choices, int64_t min_chunks,
                                    int64_t* counts);

enum FloatType : int32_t { kFloat32, kBFloat16, kFloat16 };
enum Status : int32_t { kOk = 0, kBadExpert = -1, kBadCount = -2 };

// Element i of an array of int32 or int64, by the bytes of one.
static inline int64_t load_index(const void* array, int32_t bytes, int64_t i) {
    return bytes == 8 ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
}

// kernels/budget.py. This structure and the three MoE ones below mirror ctypes structures in native.py, field by
// field.
struct MoeBudget {
    const float* table;  // [experts, max_chunks + 1], cost of k chunks at index k
    const float* k_bar;  // one float
    int64_t experts, max_chunks;
    int32_t per_token, uniform, use_gates;
};

// Chunk counts of one dispatch; defined in kernels/reference.py (allocate), which it matches bit for bit.
//   gates   float [tokens, top_k]
//   ids     [tokens, top_k] of id_bytes 4 or 8; negative: no expert
//   counts  int64, out: [tokens, top_k] if per_token, else [experts]
// A Status; on an error `counts` is not written.
VLLM_DPA_API int32_t vllm_dpa_allocate(const MoeBudget* budget, const float* gates, const void* ids, int32_t id_bytes,
                                       int64_t tokens, int64_t top_k, int64_t* counts);

// Name of an instruction set, or of the best one for null or ""; null if it is unknown or not available here.
VLLM_DPA_API const char* vllm_dpa_find_isa(const char* name);

// Sizes in bytes per expert, and the transposition into the blocks of layout.h. `scale` is null for a plane of
// the geometric layout, and for the sides of per_chunk. `gated`: rows are gate rows, then up rows.
VLLM_DPA_API int64_t vllm_dpa_plane_bytes(int64_t rows, int64_t columns, int64_t group_size, int32_t gated,
                                          int32_t geometric);
VLLM_DPA_API int64_t vllm_dpa_sides_bytes(int64_t rows, int64_t columns, int64_t group_size, int32_t gated,
                                          int32_t geometric);
VLLM_DPA_API void vllm_dpa_pack_plane(const char* isa, const uint8_t* plane, const uint16_t* scale, int64_t experts,
                                      int64_t rows, int64_t columns, int64_t group_size, int32_t gated,
                                      uint8_t* out);
VLLM_DPA_API void vllm_dpa_pack_sides(const uint16_t* offset, const uint16_t* scale, int64_t experts, int64_t rows,
                                      int64_t groups, int32_t gated, uint8_t* out);

struct MoeMatrix {
    const uint8_t* planes[8];
    const uint8_t* sides;
    const float* gain;  // [experts][gain_stride / 9][9]
    int64_t gain_stride;
    int64_t rows, columns;
};

struct MoeLayer {
    MoeMatrix w13, w2;
    int64_t experts;
    int32_t chunks, group_size, geometric;
};

struct MoeBatch {
    const void* x;            // [tokens, hidden] of `type`
    const float* weights;     // [tokens, top_k]
    const void* ids;          // [tokens, top_k] of id_bytes 4 or 8; negative: no expert
    const void* counts;       // [tokens, top_k] if counts_per_pair, else [experts]; of count_bytes 4 or 8
    const MoeBudget* budget;  // if not null, counts are allocated under it, and `counts` is not used
    void* out;                // [tokens, hidden] of `type`
    int64_t tokens, top_k;
    int32_t type, id_bytes, count_bytes, counts_per_pair;
    int32_t precision;  // Precision of layout.h
    int32_t path;       // 0 the faster method, 1 lut, 2 tile
};

// Sum of `count` words, for benchmarks: the time of one pass over memory.
VLLM_DPA_API uint64_t vllm_dpa_read_stream(const uint64_t* words, int64_t count);

// Routed output of one MoE layer. `scratch` may hold anything. Returns kOk, or the bytes of scratch that are
// needed if it has fewer, or a negative Status; only with kOk is all of `out` written.
VLLM_DPA_API int64_t vllm_dpa_fused_moe(const char* isa, const MoeLayer* layer, const MoeBatch* batch,
                                        uint8_t* scratch, int64_t scratch_bytes);

// The encoder's code step; see descend.cpp and native.py.
VLLM_DPA_API void vllm_dpa_descend(const float* target, const float* hessian, const float* scale, const float* offset,
                                   const float* weight, uint8_t* codes, float* error, float* gradient, int64_t rows,
                                   int64_t columns);
