// SPDX-License-Identifier: Apache-2.0
// The pool planner: pure. Each request is a buffer of fixed size that is live during some intervals; two requests whose
// intervals overlap in any mode get disjoint bytes; every request keeps one fixed offset for ever.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fsdp::memory {

struct Interval {
  uint32_t mode;  // modes (train, eval) have time axes of their own
  uint64_t begin, end;  // [begin, end)
};

struct PoolRequest {
  uint64_t bytes;  // 0: needs no buffer
  std::vector<Interval> live;
};

struct PoolPlan {
  std::vector<uint64_t> offsets;  // one a request, multiples of the alignment
  std::vector<uint32_t> slots;    // one a request: its colour, counted from 0 in first-use order
  uint64_t size_bytes = 0;
  uint64_t lower_bound_bytes = 0;  // most bytes live at one time in any mode
};

PoolPlan plan_pool(std::span<const PoolRequest> requests, uint64_t alignment_bytes);

// Empty, or which two requests share bytes while both are live. For tests and debug mode.
std::string validate(const PoolPlan &plan, std::span<const PoolRequest> requests);

}  // namespace fsdp::memory
