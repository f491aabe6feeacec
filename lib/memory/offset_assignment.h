// SPDX-License-Identifier: Apache-2.0
// Offsets for requests of unequal sizes, one request after the other, beside those it conflicts with (dynamic storage
// allocation, greedy). Inside the pool planner only.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "memory/live_sweep.h"

namespace fsdp::memory {

// Which requests are live together with which.
class Conflicts {
 public:
  // Nothing if there are so many that planning with them would take long.
  static std::optional<Conflicts> find(std::span<const LiveEvent> events, size_t request_count);
  // May name a request twice.
  std::span<const uint32_t> of(uint32_t request) const {
    return std::span(neighbours_).subspan(starts_[request], starts_[request + 1] - starts_[request]);
  }

 private:
  std::vector<uint32_t> neighbours_;
  std::vector<size_t> starts_;
};

enum class Fit {
  lowest,   // at the lowest address where it fits
  tightest  // in the smallest gap where it fits
};

// Sets the offsets of the requests in `order`; returns the end of the highest.
uint64_t assign_offsets(const Conflicts &conflicts, std::span<const uint64_t> sizes, std::span<const uint32_t> order,
                        Fit fit, std::vector<uint64_t> &offsets);

}  // namespace fsdp::memory
