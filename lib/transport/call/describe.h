// SPDX-License-Identifier: Apache-2.0
// What every transport says of its collectives alike, so that ranks compare them alike, and how sums are cut into one
// slice a rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "transport/call/fingerprint.h"

namespace fsdp::transport {

// The elements of a sum, by rank: equal slices, but that the last ones may be shorter, or empty.
class Slices {
 public:
  Slices(uint64_t count, uint32_t ranks) : count_(count), slice_((count + ranks - 1) / ranks) {}
  uint64_t longest() const noexcept { return slice_; }
  uint64_t begin(uint32_t rank) const noexcept { return std::min(rank * slice_, count_); }
  uint64_t length(uint32_t rank) const noexcept { return begin(rank + 1) - begin(rank); }

 private:
  uint64_t count_, slice_;
};

// reduce_scatter, or all_reduce where they go everywhere. INTERNAL if these sums are not what the shape allows.
Operation operation_of(std::span<const Sum> sums, bool accumulate, const Shape &shape, uint32_t ranks, const Tag &tag);
// INTERNAL if there is none.
void require_root(uint32_t root, uint32_t ranks);

// Here, since small calls feel each call of theirs.
inline void describe(Fingerprint &call, const Gather &gather) noexcept { call.add_span(0, 0, gather.bytes); }
inline void describe(Fingerprint &call, const Sum &sum) noexcept { call.add_span(sum.dtype, sum.wire, sum.count); }
template <class Span>
void describe(Fingerprint &call, std::span<const Span> spans) noexcept {
  for (const Span &span : spans) describe(call, span);
}
inline void describe_broadcast(Fingerprint &call, uint64_t bytes, uint32_t root) noexcept {
  call.add_span(0, static_cast<fsdp_dtype>(root), bytes);  // roots must agree
}

}  // namespace fsdp::transport
