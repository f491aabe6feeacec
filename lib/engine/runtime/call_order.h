// SPDX-License-Identifier: Apache-2.0
// Ranks of a model have met, and differ in how they interleave its calls with those of another model. Only ranks that
// exchange messages in both models are compared. All ranks of the model come to the same verdict and text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// Describes a call of the model, as a part of a sentence: "gathered group 'a'".
std::string describe_call(const Runtime &model, const SequencedCall &call);

// Two ranks of the model, as numbered in its team, that differ. `first` is the lowest rank with which `odd` is
// compared.
struct OrderDifference {
  uint32_t first, odd;
  uint64_t key;  // of the other model
};
// Both are collective over the model's ranks.
std::optional<OrderDifference> find_order_difference(Runtime &model);
std::string describe_order_difference(Runtime &model, const OrderDifference &difference);

}  // namespace fsdp::engine
