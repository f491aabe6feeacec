// SPDX-License-Identifier: Apache-2.0
// Ranks of a model have met, and differ in how they interleave its calls with those of another model. Only ranks that
// exchange messages in both models are compared. All ranks of the model come to the same verdict and text.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/context/model_calls.h"

namespace fsdp::engine {

class Runtime;

// The gathers and reduces that a rank has called since the ranks last met. If these are messages, all ranks must make
// the same calls in the same order. A hash of them goes into the meeting, and the calls are kept to report the first
// difference.
class CallSequence {
 public:
  // The number of a step's first calls that are kept. For a difference after them only the numbers of calls are
  // reported.
  static constexpr uint64_t max_kept = 8192;

  CallSequence() { calls_.reserve(max_kept); }
  void add(SequencedCall call) {
    hash_ = mix_calls(hash_ ^ (uint64_t{call.number} << 3 | static_cast<uint64_t>(call.kind)));
    ++count_;
    if (calls_.size() < max_kept) calls_.push_back(call);
  }
  void restart() {
    hash_ = count_ = 0;
    calls_.clear();
  }
  // The hash also covers the number of calls; it is 0 exactly if there are none.
  uint64_t hash() const { return count_ ? mix_calls(hash_ + count_) | 1 : 0; }
  uint64_t count() const { return count_; }
  std::span<const SequencedCall> calls() const { return calls_; }

 private:
  uint64_t hash_ = 0, count_ = 0;
  std::vector<SequencedCall> calls_;
};

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
