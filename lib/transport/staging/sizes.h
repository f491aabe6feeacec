// SPDX-License-Identifier: Apache-2.0
// How much of a call is under way at once. The same on all ranks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fsdp::transport::staging {

struct Sizes {
  // Of these sizes a chunk takes the link about as long as the calling thread, which enqueues it.
  uint64_t part_bytes = uint64_t{4} << 20;  // a rank's, in each slot that ranks share
  uint64_t slot_bytes = uint64_t{4} << 20;  // of one that they do not
  // After so many chunks a new round begins: see renewal.h.
  uint64_t chunks_of_round = uint64_t{1} << 28;

  // No larger than the longest call fills. A slot has room for a piece of every rank, each of them aligned.
  Sizes bounded(uint64_t longest_call, uint64_t ranks) const noexcept {
    constexpr uint64_t granule = uint64_t{64} << 10, room_of_a_rank = uint64_t{4} << 10;
    const auto bound = [&](uint64_t bytes) {
      if (longest_call >= bytes) return bytes;
      const uint64_t wanted = longest_call + ranks * room_of_a_rank;
      return std::min(bytes, (wanted + granule - 1) / granule * granule);
    };
    return {bound(part_bytes), bound(slot_bytes), chunks_of_round};
  }
};

}  // namespace fsdp::transport::staging
