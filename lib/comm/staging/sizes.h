// SPDX-License-Identifier: Apache-2.0
// How much of a call is under way at once. The same on all ranks.
#pragma once

#include <cstdint>

namespace fsdp::comm::staging {

struct Sizes {
  // Of these sizes a chunk takes the link about as long as the calling thread, which enqueues it.
  uint64_t part_bytes = uint64_t{4} << 20;  // a rank's, in each slot that ranks share
  uint64_t slot_bytes = uint64_t{4} << 20;  // of one that they do not
  // After so many chunks a new round begins: see renewal.h.
  uint64_t chunks_of_round = uint64_t{1} << 28;
};

}  // namespace fsdp::comm::staging
