// SPDX-License-Identifier: Apache-2.0
// How long a rank's slice of a sub-bucket must be. Inside the layout room only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "base/checked.h"
#include "layout/flat_layout.h"

namespace fsdp::layout {

// Estimates saturate instead of failing, since the alternative they speak for may never be chosen.
inline constexpr uint64_t too_many = UINT64_MAX;

inline uint64_t saturating_add(uint64_t a, uint64_t b) { return a > too_many - b ? too_many : a + b; }

inline uint64_t saturating_multiply(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? too_many : product;
}

inline uint64_t saturating_lcm(uint64_t a, uint64_t b) { return saturating_multiply(a / std::gcd(a, b), b); }

inline uint64_t saturating_round_up(uint64_t value, uint64_t multiple) {
  return saturating_multiply(divide_up(value, multiple), multiple);
}

struct ShardRule {
  uint64_t ranks;
  uint64_t allowance;  // elements a rank that rounding a slice to a power of two may cost

  // What the slice must be a multiple of for the next sub-bucket to start aligned.
  uint64_t unit() const { return alignment / std::gcd(alignment, ranks); }

  // The slice, at least `least`, such that all ranks hold `volume`. Slices of whole alignments are best, since the
  // start of a tensor can then be chosen such that a boundary falls between two of its granules.
  uint64_t shard_for(uint64_t volume, uint64_t granule, uint64_t unit, uint64_t least) const {
    const uint64_t needed = std::max(divide_up(volume, ranks), least);
    const auto rounded = [&](uint64_t multiple) {
      return saturating_round_up(needed, saturating_lcm(granule, multiple));
    };
    const uint64_t shard = rounded(unit);
    for (uint64_t wish : {128, 16, 8, 4, 2}) {
      const uint64_t wished = rounded(std::lcm(unit, wish));
      if (wished - shard <= allowance) return wished;
    }
    return shard;
  }
};

}  // namespace fsdp::layout
