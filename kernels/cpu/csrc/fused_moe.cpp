// SPDX-License-Identifier: Apache-2.0
// Fused MoE: w13 -> SiLU(gate) * up -> w2 -> gate-weighted sum, over the blocks of layout.h.
//
// (token, slot) pairs are sorted by (expert, k). Such a segment is multiplied by the lut or, with enough
// tokens, by the tile. A work item is a range of row blocks of one expert with all its segments, so that
// a block's planes come from memory once even where tokens of an expert differ in k. Items are cut to
// equal estimated cost and taken by the threads as they get free. A result depends on nothing but the
// pair, its k and the method; pairs of a token are summed in slot order.
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "layout.h"
#include "plain_math.h"

namespace {

constexpr int64_t kPassTokens = 512;   // more tokens are done in passes, which bounds the scratch
constexpr int64_t kOverread = 15;      // see Method::multiply
constexpr int64_t kItemsPerThread = 8;  // work items, on average: the last one to end costs 1/8 at most

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

enum Path { kAuto, kLutOnly, kTileOnly };

void load_floats(const void* x, int32_t type, int64_t first, int64_t count, float* out) {
    if (type == kFloat32) {
        memcpy(out, static_cast<const float*>(x) + first, count * sizeof(float));
        return;
    }
    const uint16_t* const from = static_cast<const uint16_t*>(x) + first;
    for (int64_t i = 0; i < count; i++) {
        if (type == kFloat16) {
            out[i] = half_to_float(from[i]);
        } else {
            const uint32_t wide = static_cast<uint32_t>(from[i]) << 16;
            memcpy(out + i, &wide, 4);
        }
    }
}

uint16_t to_bfloat16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t to_float16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to 2^16 or more
    if (bits < 0x38800000) {                       // denormal: the addition rounds to a multiple of 2^-24
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1) - (112u << 23);
    return static_cast<uint16_t>(sign | bits >> 13);
}

struct Pair {
    int64_t token, slot, expert;
    int k;
};

// Pairs [first, last) of one expert at one k.
struct Segment {
    int64_t first, last;
    int k;
    bool tile;
};

// Row blocks [first, last) of the expert that has segments [first_segment, last_segment).
struct Item {
    int64_t expert, first_segment, last_segment, first, last;
};

struct Stage {  // w13 or w2
    const MoeMatrix* matrix;
    int64_t groups, blocks;
};

class Pass {
   public:
    Pass(const MoeLayer& layer, const MoeBatch& batch, const Isa& isa, int threads)
        : layer_(layer), batch_(batch), isa_(isa), threads_(threads) {
        up_ = stage(layer.w13, (layer.w13.rows / 2 + kHalf - 1) / kHalf);
        down_ = stage(layer.w2, (layer.w2.rows + kRows - 1) / kRows);
    }

    // Bytes of scratch for `pairs` pairs of `tokens` tokens.
    int64_t scratch_bytes(int64_t tokens, int64_t pairs) const {
        const int64_t codes = activation_bytes(up_) + activation_bytes(down_);
        return 2 * tokens * activation_bytes(up_) + (pairs + kOverread) * codes +
               pairs * aligned(4 * padded(up_.blocks * kHalf)) + pairs * aligned(4 * down_.blocks * kRows) +
               threads_ * aligned(4 * kRows * pairs);
    }

    int32_t run(int64_t first_token, int64_t tokens, uint8_t* scratch) {
        first_token_ = first_token;
        tokens_ = tokens;
        const int32_t bad = collect_pairs();
        if (bad) return bad;
        cut_segments();
        lay_out(scratch);
        const std::vector<Item> up_items = cut_items(up_.blocks), down_items = cut_items(down_.blocks);
        const int64_t up_chunks = (up_.groups + kChunk - 1) / kChunk, down_chunks = (down_.groups + kChunk - 1) / kChunk;
        const int64_t pairs = static_cast<int64_t>(pairs_.size()), column_chunks = (layer_.w2.rows + 511) / 512;
#pragma omp parallel num_threads(threads_)
        {
            float* const sums = sums_ + omp_get_thread_num() * (aligned(4 * kRows * pairs) / 4);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tokens_ * up_chunks; i++) prepare_input(i / up_chunks, i % up_chunks * kChunk);
            if (needed_[true]) {
#pragma omp for schedule(static)
                for (int64_t p = 0; p < pairs; p++) line_up(p);
            }
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < up_items.size(); i++) multiply_up(up_items[i], sums);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < pairs * down_chunks; i++) {
                prepare_hidden(i / down_chunks, i % down_chunks * kChunk);
            }
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < down_items.size(); i++) multiply_down(down_items[i], sums);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tokens_ * column_chunks; i++) {
                combine(i / column_chunks, i % column_chunks * 512);
            }
        }
        return kOk;
    }

   private:
    static constexpr int64_t kChunk = 4;  // groups that one call prepares

    Stage stage(const MoeMatrix& m, int64_t blocks) const {
        return {&m, (m.columns + layer_.group_size - 1) / layer_.group_size, blocks};
    }

    int64_t padded(int64_t columns) const {
        return (columns + layer_.group_size - 1) / layer_.group_size * layer_.group_size;
    }

    const Method& method(bool tile) const { return (tile ? isa_.tile : isa_.lut)[batch_.precision]; }

    int64_t activation_bytes(const Stage& s) const {
        int64_t bytes = 0;
        for (const Method* m : {&isa_.lut[batch_.precision], &isa_.tile[batch_.precision]}) {
            if (m->multiply) bytes = std::max(bytes, m->code_bytes(s.groups, layer_.group_size));
        }
        return aligned(bytes) + 2 * aligned(4 * s.groups);
    }

    Activation activation(const Stage& s, uint8_t* at) const {
        const int64_t floats = aligned(4 * s.groups);
        return {at + 2 * floats, reinterpret_cast<float*>(at), reinterpret_cast<float*>(at + floats)};
    }

    int32_t collect_pairs() {
        pairs_.clear();
        for (int64_t t = 0; t < tokens_; t++) {
            for (int64_t s = 0; s < batch_.top_k; s++) {
                const int64_t at = (first_token_ + t) * batch_.top_k + s;
                const int64_t expert = load_index(batch_.ids, batch_.id_bytes, at);
                if (expert < 0) continue;
                if (expert >= layer_.experts) return kBadExpert;
                const int64_t k =
                    load_index(batch_.counts, batch_.count_bytes, batch_.counts_per_pair ? at : expert);
                if (k < 1 || k > layer_.chunks) return kBadCount;
                pairs_.push_back({t, s, expert, static_cast<int>(k)});
            }
        }
        std::stable_sort(pairs_.begin(), pairs_.end(), [](const Pair& a, const Pair& b) {
            return a.expert != b.expert ? a.expert < b.expert : a.k < b.k;
        });
        return kOk;
    }

    bool takes_tile(int64_t tokens, int k) const {
        if (!method(true).multiply) return false;
        if (!method(false).multiply || batch_.path == kTileOnly) return true;
        return batch_.path == kAuto && tokens >= isa_.tile_from[batch_.precision][layer_.geometric != 0][k];
    }

    void cut_segments() {
        segments_.clear();
        const int64_t pairs = static_cast<int64_t>(pairs_.size());
        for (int64_t p = 0; p < pairs;) {
            int64_t q = p;
            while (q < pairs && pairs_[q].expert == pairs_[p].expert && pairs_[q].k == pairs_[p].k) q++;
            segments_.push_back({p, q, pairs_[p].k, takes_tile(q - p, pairs_[p].k)});
            p = q;
        }
    }

    void lay_out(uint8_t* scratch) {
        const int64_t pairs = static_cast<int64_t>(pairs_.size());
        up_bytes_ = activation_bytes(up_);
        down_bytes_ = activation_bytes(down_);
        hidden_stride_ = aligned(4 * padded(up_.blocks * kHalf)) / 4;
        routed_stride_ = aligned(4 * down_.blocks * kRows) / 4;
        input_ = scratch;  // every token as lut input, then every token as tile input
        lined_up_ = input_ + 2 * tokens_ * up_bytes_;
        hidden_codes_ = lined_up_ + (pairs + kOverread) * up_bytes_;
        hidden_ = reinterpret_cast<float*>(hidden_codes_ + (pairs + kOverread) * down_bytes_);
        routed_ = hidden_ + pairs * hidden_stride_;
        sums_ = routed_ + pairs * routed_stride_;

        needed_[0] = needed_[1] = false;
        up_inputs_.resize(pairs);
        down_inputs_.resize(pairs);
        tiled_.resize(pairs);
        position_.assign(tokens_ * batch_.top_k, -1);
        for (const Segment& s : segments_) {
            needed_[s.tile] = true;
            for (int64_t p = s.first; p < s.last; p++) {
                tiled_[p] = s.tile;
                up_inputs_[p] = activation(up_, s.tile ? lined_up_ + p * up_bytes_ : input(pairs_[p].token, false));
                down_inputs_[p] = activation(down_, hidden_codes_ + p * down_bytes_);
                position_[pairs_[p].token * batch_.top_k + pairs_[p].slot] = p;
            }
        }
    }

    uint8_t* input(int64_t token, bool tile) const { return input_ + (token + (tile ? tokens_ : 0)) * up_bytes_; }

    // Estimated time of one row block, in planes streamed from memory: the first token waits for them, each
    // further one costs about half a plane of look-ups, and a tile costs its tokens whatever k is.
    static double block_cost(const Segment& s) {
        const double tokens = static_cast<double>(s.last - s.first);
        return s.tile ? 2.0 * s.k + 0.5 * tokens : s.k * (0.5 + 0.5 * tokens);
    }

    std::vector<Item> cut_items(int64_t blocks) const {
        std::vector<Item> experts;
        std::vector<double> cost;
        double total = 0;
        const int64_t segments = static_cast<int64_t>(segments_.size());
        for (int64_t s = 0; s < segments;) {
            int64_t end = s;
            double c = 0;
            const int64_t expert = pairs_[segments_[s].first].expert;
            for (; end < segments && pairs_[segments_[end].first].expert == expert; end++) c += block_cost(segments_[end]);
            experts.push_back({expert, s, end, 0, blocks});
            cost.push_back(c);
            total += c * static_cast<double>(blocks);
            s = end;
        }
        if (threads_ == 1) return experts;
        std::vector<Item> items;
        const double share = total / static_cast<double>(threads_ * kItemsPerThread);
        for (size_t e = 0; e < experts.size(); e++) {
            const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(share / cost[e]));
            for (int64_t b = 0; b < blocks; b += step) {
                items.push_back(experts[e]);
                items.back().first = b;
                items.back().last = std::min(blocks, b + step);
            }
        }
        return items;
    }

    void prepare_input(int64_t token, int64_t first) {
        const int64_t gs = layer_.group_size, last = std::min(first + kChunk, up_.groups);
        const int64_t columns = layer_.w13.columns, from = first * gs, to = std::min(last * gs, columns);
        alignas(64) float x[kChunk * kMaxGroup];
        load_floats(batch_.x, batch_.type, (first_token_ + token) * columns + from, to - from, x);
        std::fill(x + (to - from), x + (last - first) * gs, 0.0f);
        for (int tile = 0; tile < 2; tile++) {
            if (needed_[tile]) prepare(up_, tile, x, first, last, input(token, tile));
        }
    }

    // The tokens of a tile lie one stride apart, and a token is in as many tiles as it has experts.
    void line_up(int64_t pair) {
        if (tiled_[pair]) memcpy(lined_up_ + pair * up_bytes_, input(pairs_[pair].token, true), up_bytes_);
    }

    void prepare_hidden(int64_t pair, int64_t first) {
        const int64_t gs = layer_.group_size, last = std::min(first + kChunk, down_.groups);
        const int64_t from = first * gs, to = std::min(last * gs, layer_.w2.columns);
        // Rows past the last one were multiplied by zeros, but 0 * Inf is NaN: cleared, not trusted.
        float* const x = hidden_ + pair * hidden_stride_ + from;
        std::fill(x + (to - from), x + (last * gs - from), 0.0f);
        prepare(down_, tiled_[pair], x, first, last, hidden_codes_ + pair * down_bytes_);
    }

    void prepare(const Stage& s, bool tile, const float* x, int64_t first, int64_t last, uint8_t* at) const {
        const Activation a = activation(s, at);
        method(tile).prepare(x, first, last, s.groups, layer_.group_size, const_cast<uint8_t*>(a.codes),
                             const_cast<float*>(a.scale), const_cast<float*>(a.sum));
    }

    Matrix matrix(const Stage& s, int64_t expert) const {
        Matrix m;
        m.groups = s.groups;
        m.group_size = layer_.group_size;
        m.geometric = layer_.geometric != 0;
        const int64_t blocks = expert * s.blocks * s.groups;
        for (int j = 0; j < layer_.chunks; j++) {
            m.plane[j] = s.matrix->planes[j] + blocks * plane_stride(m.group_size, m.geometric);
        }
        m.sides = s.matrix->sides + blocks * sides_stride(m.geometric);
        return m;
    }

    const float* gain(const MoeMatrix& m, int64_t expert, int k) const {
        return m.gain + expert * m.gain_stride + k;
    }

    // use(pair, sums of 32 rows) for every pair of the item and each of its blocks.
    template <typename Use>
    void multiply(const Stage& stage, const Item& item, const std::vector<Activation>& inputs, float* sums, Use use) {
        const Matrix w = matrix(stage, item.expert);
        for (int64_t block = item.first; block < item.last; block++) {
            for (int64_t i = item.first_segment; i < item.last_segment; i++) {
                const Segment& s = segments_[i];
                const Method& m = method(s.tile);
                for (int64_t p = s.first; p < s.last; p += m.max_tokens) {
                    const int count = static_cast<int>(std::min<int64_t>(m.max_tokens, s.last - p));
                    m.multiply(w, s.k, block, &inputs[p], count, sums);
                    for (int c = 0; c < count; c++) use(p + c, s.k, block, sums + c * kRows);
                }
            }
        }
    }

    void multiply_up(const Item& item, float* sums) {
        multiply(up_, item, up_inputs_, sums, [&](int64_t pair, int k, int64_t block, const float* s) {
            const float* g = gain(layer_.w13, item.expert, k);
            isa_.silu_mul(s, s + kHalf, g[0], g[kTiers], hidden_ + pair * hidden_stride_ + block * kHalf);
        });
    }

    void multiply_down(const Item& item, float* sums) {
        multiply(down_, item, down_inputs_, sums, [&](int64_t pair, int, int64_t block, const float* s) {
            memcpy(routed_ + pair * routed_stride_ + block * kRows, s, sizeof(float) * kRows);
        });
    }

    void combine(int64_t token, int64_t first) {
        const int64_t columns = layer_.w2.rows, count = std::min<int64_t>(512, columns - first);
        float total[512] = {};
        for (int64_t s = 0; s < batch_.top_k; s++) {
            const int64_t p = position_[token * batch_.top_k + s];
            if (p < 0) continue;
            const float weight = batch_.weights[(first_token_ + token) * batch_.top_k + s] *
                                 *gain(layer_.w2, pairs_[p].expert, pairs_[p].k);
            const float* from = routed_ + p * routed_stride_ + first;
            for (int64_t i = 0; i < count; i++) total[i] += weight * from[i];
        }
        const int64_t at = (first_token_ + token) * columns + first;
        if (batch_.type == kFloat32) {
            memcpy(static_cast<float*>(batch_.out) + at, total, count * sizeof(float));
            return;
        }
        uint16_t* const to = static_cast<uint16_t*>(batch_.out) + at;
        for (int64_t i = 0; i < count; i++) {
            to[i] = batch_.type == kBFloat16 ? to_bfloat16(total[i]) : to_float16(total[i]);
        }
    }

    const MoeLayer& layer_;
    const MoeBatch& batch_;
    const Isa& isa_;
    const int threads_;
    Stage up_, down_;
    int64_t first_token_ = 0, tokens_ = 0;
    int64_t up_bytes_ = 0, down_bytes_ = 0, hidden_stride_ = 0, routed_stride_ = 0;
    bool needed_[2] = {};
    std::vector<Pair> pairs_;
    std::vector<Segment> segments_;
    std::vector<Activation> up_inputs_, down_inputs_;  // by pair
    std::vector<uint8_t> tiled_;                       // by pair
    std::vector<int64_t> position_;                    // (token, slot) -> pair, -1 where there is none
    uint8_t *input_ = nullptr, *lined_up_ = nullptr, *hidden_codes_ = nullptr;
    float *hidden_ = nullptr, *routed_ = nullptr, *sums_ = nullptr;
};

}  // namespace

VLLM_DPA_API int64_t vllm_dpa_fused_moe(const char* isa, const MoeLayer* layer, const MoeBatch* given,
                                        uint8_t* scratch, int64_t scratch_bytes) {
    MoeBatch batch = *given;
    int64_t for_counts = 0;
    if (batch.budget) {
        batch.counts_per_pair = batch.budget->per_token;
        batch.count_bytes = 8;
        for_counts = aligned(8 * (batch.counts_per_pair ? batch.tokens * batch.top_k : batch.budget->experts));
    }
    Pass pass(*layer, batch, *find_isa(isa), omp_get_max_threads());
    const int64_t most = std::min(batch.tokens, kPassTokens);
    const int64_t needed = for_counts + pass.scratch_bytes(most, most * batch.top_k);
    if (scratch_bytes < needed) return needed;
    if (batch.budget) {
        int64_t* const counts = reinterpret_cast<int64_t*>(scratch);
        const int32_t status = vllm_dpa_allocate(batch.budget, batch.weights, batch.ids, batch.id_bytes, batch.tokens,
                                                 batch.top_k, counts);
        if (status) return status;
        batch.counts = counts;
    }
    for (int64_t t = 0; t < batch.tokens; t += kPassTokens) {
        const int32_t status = pass.run(t, std::min(kPassTokens, batch.tokens - t), scratch + for_counts);
        if (status) return status;
    }
    return kOk;
}
