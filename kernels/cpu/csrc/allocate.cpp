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

float energy_of(float gate, const MoeBudget& budget) {
    if (!budget.use_gates) return 1;
    const float g = gate < 0 ? 0 : gate;  // NaN stays
    return g * g;
}

int64_t clamped(double wanted, int64_t low, int64_t high) {
    return std::min(std::max(static_cast<int64_t>(std::nearbyint(wanted)), low), high);
}

// Chunks of the given experts, in the order given.
struct Problem {
    std::vector<int64_t> experts, counts;
    std::vector<float> energy, cost;
    std::vector<uint8_t> active;
    Scratch scratch;

    void clear() {
        experts.clear();
        energy.clear();
    }

    void solve(const MoeBudget& budget) {
        const int64_t n = static_cast<int64_t>(experts.size()), most = budget.max_chunks;
        const double k_bar = *budget.k_bar;
        if (budget.uniform) {
            counts.assign(n, clamped(k_bar, kMinChunks, most));
            return;
        }
        const int64_t choices = most + 1 - kMinChunks;
        cost.resize(n * choices);
        counts.resize(n);
        active.assign(n, 1);
        for (int64_t i = 0; i < n; i++) {
            const float* from = budget.table + experts[i] * (most + 1) + kMinChunks;
            for (int64_t c = 0; c < choices; c++) cost[i * choices + c] = energy[i] * from[c];
        }
        const int64_t chunks = clamped(static_cast<double>(n) * k_bar, n * kMinChunks, n * most);
        solve_row(cost.data(), active.data(), chunks, n, choices, kMinChunks, counts.data(), scratch);
    }
};

// The ids and gates of a dispatch.
struct Routing {
    const float* gates;
    const void* ids;
    int32_t id_bytes;
    int64_t tokens, top_k;

    int64_t expert(int64_t pair) const { return load_index(ids, id_bytes, pair); }
};

void allocate_dispatch(const MoeBudget& budget, const Routing& routing, int64_t* counts) {
    std::vector<double> energy(budget.experts, 0.0);
    std::vector<uint8_t> active(budget.experts, 0);
    for (int64_t i = 0; i < routing.tokens * routing.top_k; i++) {
        const int64_t expert = routing.expert(i);
        if (expert < 0) continue;
        active[expert] = 1;
        energy[expert] += energy_of(routing.gates[i], budget);
    }
    Problem problem;
    for (int64_t e = 0; e < budget.experts; e++) {
        counts[e] = 0;
        if (!active[e]) continue;
        problem.experts.push_back(e);
        problem.energy.push_back(static_cast<float>(energy[e]));
    }
    problem.solve(budget);
    for (size_t i = 0; i < problem.experts.size(); i++) counts[problem.experts[i]] = problem.counts[i];
}

void allocate_token(const MoeBudget& budget, const Routing& routing, int64_t token, Problem& problem,
                    std::vector<int64_t>& pairs, int64_t* counts) {
    problem.clear();
    pairs.clear();
    for (int64_t p = token * routing.top_k; p < (token + 1) * routing.top_k; p++) {
        counts[p] = 0;
        if (routing.expert(p) >= 0) pairs.push_back(p);
    }
    // The tie rule goes by expert id.
    std::stable_sort(pairs.begin(), pairs.end(),
                     [&](int64_t a, int64_t b) { return routing.expert(a) < routing.expert(b); });
    for (const int64_t p : pairs) {
        problem.experts.push_back(routing.expert(p));
        problem.energy.push_back(energy_of(routing.gates[p], budget));
    }
    problem.solve(budget);
    for (size_t i = 0; i < pairs.size(); i++) counts[pairs[i]] = problem.counts[i];
}

}  // namespace

VLLM_DPA_API int32_t vllm_dpa_allocate(const MoeBudget* budget, const float* gates, const void* ids, int32_t id_bytes,
                                       int64_t tokens, int64_t top_k, int64_t* counts) {
    const Routing routing = {gates, ids, id_bytes, tokens, top_k};
    for (int64_t i = 0; i < tokens * top_k; i++) {
        if (routing.expert(i) >= budget->experts) return kBadExpert;
    }
    if (!budget->per_token) {
        allocate_dispatch(*budget, routing, counts);
        return kOk;
    }
#pragma omp parallel if (tokens >= kParallelRows)
    {
        Problem problem;
        std::vector<int64_t> pairs;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) allocate_token(*budget, routing, t, problem, pairs, counts);
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
