// SPDX-License-Identifier: Apache-2.0
// Finds which parameters with FSDP_MISSING_GRAD_SKIP have a gradient in a step, on any rank of the model. In the
// meeting that ends the step, ranks exchange hashes of their bits. If the hashes differ, the bits of all ranks follow:
// 8 bytes per rank for 64 parameters.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

class GivenGrads {
 public:
  explicit GivenGrads(Runtime &runtime);

  bool any() const noexcept { return !params_.empty(); }  // are there such parameters?
  // The hash of this rank's present bits; 0 if there are no such parameters.
  uint64_t hash() noexcept;
  // Collective over the model: afterwards Contribution::given of these parameters covers all ranks of their meshes.
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
  std::vector<uint64_t> bits_;         // this rank's bits
  std::vector<uint64_t> all_;          // the bits of all ranks, one rank after the other
};

}  // namespace fsdp::engine
