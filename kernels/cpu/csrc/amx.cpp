// SPDX-License-Identifier: Apache-2.0
// AMX int8: the tables of AVX512 for few tokens, and for many a tile that is multiplied by matrix units.
//
// A decoded half block, [group_size / 4][16 rows][4 columns] u8, is what AMX takes as its second operand;
// the first one is 16 tokens x 64 columns of int8 codes, read from where they lie one stride apart.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "avx512_tile.h"
#include "layout.h"

namespace {

constexpr int kTileTokens = 16;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// tmm0, 1: int32 sums of the two halves; 2, 3: tokens; 4..7: weights, two of each half.
void configure(int group_size) {
    const int columns = group_size < 64 ? group_size : 64;
    TileConfig config;
    for (int i = 0; i < 8; i++) {
        config.rows[i] = static_cast<uint8_t>(i < 4 ? kTileTokens : columns / 4);
        config.bytes_per_row[i] = static_cast<uint16_t>(i == 2 || i == 3 ? columns : 64);
    }
    _tile_loadconfig(&config);
}

// dot[half][token][row] of 16 tokens and the group whose weights are in tmm4..7.
template <bool kTwoSteps>
INLINE void dot_tokens(const uint8_t* codes, int64_t stride, int32_t (*dot)[kTileTokens][kHalf]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, codes, stride);
    _tile_dpbsud(0, 2, 4);
    _tile_dpbsud(1, 2, 6);
    if (kTwoSteps) {
        _tile_loadd(3, codes + 64, stride);
        _tile_dpbsud(0, 3, 5);
        _tile_dpbsud(1, 3, 7);
    }
    _tile_stored(0, dot[0], 64);
    _tile_stored(1, dot[1], 64);
}

// Adds the products of one group to out[token][32].
INLINE void add_group(const int32_t (*dot)[kTileTokens][kHalf], const HalfTile half[2], float centre,
                      const Activation* x, int tokens, int64_t groups, int group_size, int64_t g, float* out) {
    for (int m = 0; m < tokens; m++) {
        const GroupOfToken token = group_of_token(x[m], groups, group_size, g, centre);
        for (int n = 0; n < 2; n++) {
            add_half(_mm512_load_si512(dot[n][m]), token, half[n], out + m * kRows + n * kHalf);
        }
    }
}

void tile_multiply(const Matrix& w, int k, int64_t block, const Activation* x, int tokens, float* out) {
    alignas(64) uint8_t tile[kMaxGroup * kRows];
    alignas(64) int32_t dot[2][2][kTileTokens][kHalf];
    memset(out, 0, sizeof(float) * kRows * tokens);
    const float centre = tile_centre(w, k);
    const int gs = w.group_size;
    const int64_t stride = tokens > 1 ? x[1].codes - x[0].codes : 64;
    configure(gs);
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t at = block * w.groups + g;
        const HalfTile half[2] = {decode_half(w, k, at, 0, tile), decode_half(w, k, at, 1, tile + 16 * gs)};
        _tile_loadd(4, tile, 64);
        _tile_loadd(6, tile + 16 * gs, 64);
        if (gs == 128) {
            _tile_loadd(5, tile + 1024, 64);
            _tile_loadd(7, tile + 16 * gs + 1024, 64);
        }
        // The matrix units work on 16 tokens while the vector units add those before them.
        for (int t = 0, turn = 0; t < tokens + kTileTokens; t += kTileTokens, turn ^= 1) {
            if (t < tokens) {
                const uint8_t* const codes = x[t].codes + g * gs;
                if (gs == 128) {
                    dot_tokens<true>(codes, stride, dot[turn]);
                } else {
                    dot_tokens<false>(codes, stride, dot[turn]);
                }
            }
            const int before = t - kTileTokens;
            if (before < 0) continue;
            const int count = tokens - before < kTileTokens ? tokens - before : kTileTokens;
            add_group(dot[turn ^ 1], half, centre, x + before, count, w.groups, gs, g, out + before * kRows);
        }
    }
    _tile_release();
}

// Linux gives a process the tile registers when it asks for them.
bool may_use_tiles() noexcept {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The tile of int8 activations, with its switch as measured, in place of AVX512's.
Isa make_isa(const Isa& avx512) noexcept {
    constexpr int16_t kNever = 0x7fff;
    constexpr int16_t kTileFrom[2][kTiers] = {{kNever, kNever, 10, 7, 6, 5, 5, 5, 5},
                                              {kNever, kNever, 10, 7, 5, 5, 5, 4, 4}};
    Isa isa = avx512;
    isa.name = "amx";
    isa.tile[kInt8] = {tile_bytes, tile_prepare, tile_multiply, 1 << 30};
    memcpy(isa.tile_from[kInt8], kTileFrom, sizeof kTileFrom);
    return isa;
}

}  // namespace

const Isa* amx_isa() noexcept {
    static const bool available = avx512_isa() && may_use_tiles();
    if (!available) return nullptr;
    static const Isa isa = make_isa(*avx512_isa());
    return &isa;
}
