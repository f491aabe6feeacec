// SPDX-License-Identifier: Apache-2.0
// Ranks that keep the same rows and have read a part of them each get the rest from each other: block by block, as they
// have it now, in the model's types.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "base/error.h"
#include "checkpoint/job/row_taker.h"
#include "checkpoint/plan/save_plan.h"
#include "transport/team.h"

namespace fsdp::checkpoint {

struct KeptAccess {
  const ModelShards &shards;
  uint32_t rank;  // of the mesh
  const ReadKept &read;
  const WriteKept &write;
  std::span<std::byte> staging;  // gather_bytes or more
};

// Memory for so many holders or fewer: two blocks, unless they are very many.
uint64_t gather_bytes(uint32_t holders);

// Collective over those that keep the same rows of all these tensors, numbered as ModelShards::holder does. What
// reading or writing throws comes back, when all have got what they wait for from this rank.
std::optional<Error> gather_shares(transport::Team &holders, const KeptAccess &shared,
                                   std::span<const KeptTensor *const> tensors);

}  // namespace fsdp::checkpoint
