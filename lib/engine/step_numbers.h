// SPDX-License-Identifier: Apache-2.0
// The numbers that every rank gives to the calls of an update window and must give alike: each rank computes with its
// own, and different ones would make the replicas of a weight drift apart unseen. They travel in the meetings of the
// model.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

namespace fsdp::engine {

enum class ScalingKind : uint64_t { none, scale, clip };

// One scaling of the main grads.
struct Scaling {
  ScalingKind kind = ScalingKind::none;
  double number = 0;  // the factor or max_norm
  static constexpr double of_the_model = -1;
  double norm = 0;  // that was clipped: with a further mesh on some ranks alone it is not the same on all
  // Of bits, but all NaNs are one.
  bool operator==(const Scaling &other) const;
};

// All of them since the update window opened. The first are kept, and a hash tells whether any differs.
class Scalings {
 public:
  static constexpr uint64_t most_kept = 3;

  void add(const Scaling &scaling);
  void restart() { *this = {}; }
  uint64_t count() const { return count_; }
  uint64_t hash() const { return hash_ * 31 + count_; }  // for ranks that cannot be told more
  const Scaling &kept(uint64_t index) const { return first_[index]; }
  bool operator==(const Scalings &) const = default;

 private:
  uint64_t count_ = 0, hash_ = 0;
  std::array<Scaling, most_kept> first_;
};

struct StepNumbers {
  // Of a step of AdamW, with defaults filled in.
  double beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
  uint64_t step = 0;
  // Of fsdp_apply_grads; -1: the gradients end in another call, which does what it does by itself.
  double max_norm = -1;
  uint64_t asks_norm = 0;
  Scalings scalings;
  uint64_t lr_scales = 0;  // a hash of those that all parameters have
};

// The numbers of a rank that the first one has otherwise, as text that names both; empty if there is none. Not the
// lr_scales, of which there is only the hash.
std::string compare_numbers(uint32_t rank, const StepNumbers &theirs, uint32_t first, const StepNumbers &of_first);

}  // namespace fsdp::engine
