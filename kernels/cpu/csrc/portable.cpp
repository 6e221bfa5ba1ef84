// SPDX-License-Identifier: Apache-2.0
// The kernel for any processor: the plain tile, whatever the precision asked for.
#include "plain_tile.h"

namespace {

constexpr Isa kPortable = {"portable", kByColumn, {}, {kPlainTile, kPlainTile}, {}, silu_mul_16};

}  // namespace

const Isa* portable_isa() { return &kPortable; }
