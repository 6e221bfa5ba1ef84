// SPDX-License-Identifier: Apache-2.0
// The DRAM roof for benchmarks: what these threads can read per second, and nothing else.
#include <omp.h>

#include <algorithm>

#include "kernels.h"

VLLM_DPA_API uint64_t vllm_dpa_read_stream(const uint64_t* words, int64_t count) {
    uint64_t total = 0;
    const int64_t parts = 8 * omp_get_max_threads(), size = (count + parts - 1) / parts;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t p = 0; p < parts; p++) {
        uint64_t sum = 0;
        const int64_t end = std::min(count, (p + 1) * size);
        for (int64_t i = p * size; i < end;) {
            __builtin_prefetch(words + i + 256);  // as far ahead as the kernels do
            for (const int64_t line = std::min(end, i + 8); i < line; i++) sum += words[i];
        }
        total += sum;
    }
    return total;
}
