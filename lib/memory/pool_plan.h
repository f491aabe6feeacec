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
  uint32_t mode;        // modes (train, eval) have time axes of their own
  uint64_t begin, end;  // [begin, end)
};

struct PoolRequest {
  uint64_t bytes;  // 0: needs no buffer
  std::vector<Interval> live;
  // Requests of different tracks (forward and backward of an interleaved schedule) advance independently of each other,
  // so that any two of them may be live at one time.
  uint32_t track = 0;
};

inline constexpr uint32_t no_slot = UINT32_MAX;

struct PoolPlan {
  std::vector<uint64_t> offsets;  // one a request, multiples of the alignment
  // One a request: its colour, counted from 0 in first-use order; no_slot if it needs no buffer. Requests of one slot
  // are never live together. With unequal sizes the bytes of two slots may overlap where their members never meet.
  std::vector<uint32_t> slots;
  uint64_t size_bytes = 0;         // a multiple of the alignment
  uint64_t lower_bound_bytes = 0;  // most bytes live at one time in any mode, each buffer rounded up to the alignment
};

// Throws INVALID_ARGUMENT if the alignment is 0 or the sizes overflow.
PoolPlan plan_pool(std::span<const PoolRequest> requests, uint64_t alignment_bytes);

// Empty, or which two requests share bytes while both are live. For tests and debug mode.
std::string validate(const PoolPlan &plan, std::span<const PoolRequest> requests);

}  // namespace fsdp::memory
