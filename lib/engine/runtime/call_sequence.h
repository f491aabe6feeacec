// SPDX-License-Identifier: Apache-2.0
// The gathers and reduces that a rank has called since the ranks last met. If these are messages, all ranks must make
// the same calls in the same order. A hash of them goes into the meeting, and the calls are kept to report the first
// difference.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::engine {

// A join is the gather of one more piece in the launch of the gather before it.
enum class CallKind : uint32_t { gather, reduce, replay, cancel, join };

struct SequencedCall {
  CallKind kind;
  // For a gather, the slot's number; for a reduce, the part's number; for a replay or its cancel, the capture's number.
  uint32_t number;
  bool operator==(const SequencedCall &) const = default;
};

class CallSequence {
 public:
  // The number of a step's first calls that are kept. For a difference after them only the numbers of calls are
  // reported.
  static constexpr uint64_t max_kept = 8192;

  CallSequence() { calls_.reserve(max_kept); }
  void add(CallKind kind, uint32_t number) {
    hash_ = mix(hash_ ^ (uint64_t{number} << 3 | static_cast<uint64_t>(kind)));
    ++count_;
    if (calls_.size() < max_kept) calls_.push_back({kind, number});
  }
  void restart() {
    hash_ = count_ = 0;
    calls_.clear();
  }
  // The hash also covers the number of calls; it is 0 exactly if there are none.
  uint64_t hash() const { return count_ ? mix(hash_ + count_) | 1 : 0; }
  uint64_t count() const { return count_; }
  std::span<const SequencedCall> calls() const { return calls_; }

 private:
  static constexpr uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return (x ^ x >> 31) + 0x9E3779B97F4A7C15ull;
  }

  uint64_t hash_ = 0, count_ = 0;
  std::vector<SequencedCall> calls_;
};

}  // namespace fsdp::engine
