// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"

namespace {

constexpr int64_t kMinChunks = 2;
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

float gate_energy(float gate) {
    const float g = gate < 0 ? 0 : gate;  // NaN stays
    return g * g;
}

// One knapsack over `experts`, in the order given.
struct Problem {
    std::vector<int64_t> experts, counts;
    std::vector<float> energy, cost;
    std::vector<uint8_t> active;
    Scratch scratch;

    void clear() {
        experts.clear();
        energy.clear();
    }

    void solve(const float* table, int64_t max_chunks, double k_bar) {
        const int64_t n = static_cast<int64_t>(experts.size()), choices = max_chunks + 1 - kMinChunks;
        cost.resize(n * choices);
        counts.resize(n);
        active.assign(n, 1);
        for (int64_t i = 0; i < n; i++) {
            const float* from = table + experts[i] * (max_chunks + 1) + kMinChunks;
            for (int64_t c = 0; c < choices; c++) cost[i * choices + c] = energy[i] * from[c];
        }
        const int64_t wanted = static_cast<int64_t>(std::nearbyint(static_cast<double>(n) * k_bar));
        const int64_t budget = std::min(std::max(wanted, n * kMinChunks), n * max_chunks);
        solve_row(cost.data(), active.data(), budget, n, choices, kMinChunks, counts.data(), scratch);
    }
};

}  // namespace

VLLM_DPA_API int32_t vllm_dpa_allocate(const float* gates, const void* ids, int32_t id_bytes, int64_t tokens,
                                       int64_t top_k, const float* table, int64_t experts, int64_t max_chunks,
                                       const float* k_bar, int32_t per_token, int64_t* counts) {
    for (int64_t i = 0; i < tokens * top_k; i++) {
        if (load_index(ids, id_bytes, i) >= experts) return kBadExpert;
    }
    if (!per_token) {
        std::vector<double> energy(experts, 0.0);
        std::vector<uint8_t> active(experts, 0);
        for (int64_t i = 0; i < tokens * top_k; i++) {
            const int64_t expert = load_index(ids, id_bytes, i);
            if (expert < 0) continue;
            active[expert] = 1;
            energy[expert] += gate_energy(gates[i]);
        }
        Problem problem;
        for (int64_t e = 0; e < experts; e++) {
            counts[e] = 0;
            if (!active[e]) continue;
            problem.experts.push_back(e);
            problem.energy.push_back(static_cast<float>(energy[e]));
        }
        problem.solve(table, max_chunks, *k_bar);
        for (size_t i = 0; i < problem.experts.size(); i++) counts[problem.experts[i]] = problem.counts[i];
        return kOk;
    }
#pragma omp parallel if (tokens >= kParallelRows)
    {
        Problem problem;
        std::vector<int64_t> slots;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            problem.clear();
            slots.clear();
            for (int64_t s = 0; s < top_k; s++) {
                counts[t * top_k + s] = 0;
                if (load_index(ids, id_bytes, t * top_k + s) >= 0) slots.push_back(t * top_k + s);
            }
            // The tie rule goes by expert id.
            std::stable_sort(slots.begin(), slots.end(), [&](int64_t a, int64_t b) {
                return load_index(ids, id_bytes, a) < load_index(ids, id_bytes, b);
            });
            for (const int64_t s : slots) {
                problem.experts.push_back(load_index(ids, id_bytes, s));
                problem.energy.push_back(gate_energy(gates[s]));
            }
            problem.solve(table, max_chunks, *k_bar);
            for (size_t i = 0; i < slots.size(); i++) counts[slots[i]] = problem.counts[i];
        }
    }
    return kOk;
}

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
