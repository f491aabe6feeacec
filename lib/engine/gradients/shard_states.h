// SPDX-License-Identifier: Apache-2.0
// The optimizer states of a shard by their names.
#pragma once

#include <string_view>

#include "engine/gradients/adamw_spans.h"

namespace fsdp::engine {

// Elements of an optimizer state in memory. Their number is in the shard.
struct StatePart {
  std::byte *data;
  const uint64_t *count;
  fsdp_dtype dtype;
};

// This rank's part of a state, also where its address is in the home file. The scales of a state in codes are the state
// NAME.absmax. Throws INVALID_ARGUMENT with the names that the parameter has.
StatePart find_state(const Runtime &runtime, const Shard &shard, std::string_view name, const char *call);

}  // namespace fsdp::engine
