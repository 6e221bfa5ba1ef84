// SPDX-License-Identifier: Apache-2.0
// C functions of the extension, called from kernels/cpu/native.py through ctypes. Shapes are row-major
// and contiguous; the Python side has checked them.
#pragma once

#include <cstdint>

#define VLLM_DPA_API extern "C" __attribute__((visibility("default")))

// Changes whenever a signature below does; native.py refuses a module built from other sources.
constexpr int kInterfaceVersion = 1;

VLLM_DPA_API int vllm_dpa_interface_version();

// Exact multi-choice knapsack, row by row; defined in kernels/reference.py, which it matches bit for bit.
//   cost    float [rows, items, choices], k = min_chunks + choice
//   active  uint8 [rows, items]; inactive items get 0
//   budget  int64 [rows], one that the row's active items can meet
//   counts  int64 [rows, items], out
VLLM_DPA_API void vllm_dpa_knapsack(const float* cost, const uint8_t* active, const int64_t* budget,
                                    int64_t rows, int64_t items, int64_t choices, int64_t min_chunks,
                                    int64_t* counts);
