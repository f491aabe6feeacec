// SPDX-License-Identifier: Apache-2.0
// Which parameters with FSDP_MISSING_GRAD_SKIP have got a gradient in a step, on any rank of the model. Ranks tell a
// hash of their own bits in the meeting that ends the step. Where all have the same there is nothing more to tell; else
// the bits of all follow, 64 parameters in 8 bytes a rank.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

class GivenGrads {
 public:
  explicit GivenGrads(Runtime &runtime);

  bool any() const noexcept { return !params_.empty(); }  // are there such parameters?
  // Of this rank's, as they are now; 0 where there are none.
  uint64_t hash() noexcept;
  // Collective over the model: afterwards Contribution::given of these parameters is that of all ranks.
  void share();

 private:
  struct SkippingParam {
    uint32_t group, param_index;
  };
  void pack() noexcept;
  uint8_t &given(const SkippingParam &param) const noexcept {
    return runtime_.groups[param.group].grad.given[param.param_index];
  }

  Runtime &runtime_;
  std::vector<SkippingParam> params_;  // in the order of declaration
  std::vector<uint64_t> bits_;         // this rank's
  std::vector<uint64_t> all_;          // ... and those of all ranks, one rank after the other
};

}  // namespace fsdp::engine
