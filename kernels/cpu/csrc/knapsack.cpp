// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// A row of a token takes about half a microsecond: fewer are not worth waking the other threads for.
constexpr int64_t kParallelRows = 1024;

// Buffers of one thread, kept over its rows.
struct Scratch {
    std::vector<float> tail, best;
    std::vector<uint8_t> pick;  // [items, width]
};

// tail[b]: least cost of the items after the current one with b chunks beyond their minimum.
void solve_row(const float* cost, const uint8_t* active, int64_t budget, int64_t items, int64_t choices,
               int64_t min_chunks, int64_t* counts, Scratch& scratch) {
    int64_t spare = budget;
    for (int64_t i = 0; i < items; i++) spare -= active[i] ? min_chunks : 0;
    const int64_t width = spare + 1;
    scratch.tail.assign(width, kInfinity);
    scratch.best.resize(width);
    scratch.pick.assign(items * width, 0);
    scratch.tail[0] = 0;

    for (int64_t i = items - 1; i >= 0; i--) {
        if (!active[i]) continue;
        uint8_t* pick = &scratch.pick[i * width];
        float* best = scratch.best.data();
        const float* tail = scratch.tail.data();
        std::fill(best, best + width, kInfinity);
        // From many chunks to few, strictly smaller wins: at equal cost the larger k stays.
        for (int64_t extra = std::min(choices, width) - 1; extra >= 0; extra--) {
            const float price = cost[i * choices + extra];
            for (int64_t b = extra; b < width; b++) {
                const float candidate = tail[b - extra] + price;
                const bool better = candidate < best[b];
                best[b] = better ? candidate : best[b];
                pick[b] = better ? static_cast<uint8_t>(extra) : pick[b];
            }
        }
        std::swap(scratch.tail, scratch.best);
    }
    for (int64_t i = 0; i < items; i++) {
        const int64_t extra = active[i] ? scratch.pick[i * width + spare] : 0;
        counts[i] = active[i] ? min_chunks + extra : 0;
        spare -= extra;
    }
}

}  // namespace

VLLM_DPA_API void vllm_dpa_knapsack(const float* cost, const uint8_t* active, const int64_t* budget,
                                    int64_t rows, int64_t items, int64_t choices, int64_t min_chunks,
                                    int64_t* counts) {
#pragma omp parallel if (rows >= kParallelRows)
    {
        Scratch scratch;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            solve_row(cost + r * items * choices, active + r * items, budget[r], items, choices, min_chunks,
                      counts + r * items, scratch);
        }
    }
}
