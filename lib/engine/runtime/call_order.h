// SPDX-License-Identifier: Apache-2.0
// Finds where ranks of a model that have met differ in how they interleave its calls with those of another model. Only
// ranks that exchange messages in both models are compared. All ranks of the model get the same verdict and text.
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
// the same calls in the same order. The meeting compares a hash of the calls; the calls are kept to report the first
// difference.
class CallSequence {
 public:
  // The number of calls that are kept, from the start of a step. If ranks differ only in later calls, the report has
  // only the numbers of calls.
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
  // The hash also covers the number of calls. It is 0 if and only if there are no calls.
  uint64_t hash() const { return count_ ? mix_calls(hash_ + count_) | 1 : 0; }
  uint64_t count() const { return count_; }
  std::span<const SequencedCall> calls() const { return calls_; }

 private:
  uint64_t hash_ = 0, count_ = 0;
  std::vector<SequencedCall> calls_;
};

// Describes a call of the model as a clause: "gathered group 'a'".
std::string describe_call(const Runtime &model, const SequencedCall &call);

// Two ranks that differ, as numbered in the model's team. `first` is the lowest rank with which `odd` is compared.
struct OrderDifference {
  uint32_t first, odd;
  uint64_t key;  // key of the other model
};
// Both are collective over the model's ranks.
std::optional<OrderDifference> find_order_difference(Runtime &model);
std::string describe_order_difference(Runtime &model, const OrderDifference &difference);

}  // namespace fsdp::engine
