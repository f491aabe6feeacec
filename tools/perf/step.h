// SPDX-License-Identifier: Apache-2.0
// A training step of a synthetic model through the public header; compute is a timed wait, as an accelerator would be
// to the host.
#pragma once

#include "perf/abi_model.h"

namespace perf {

// Seconds for each group, in each direction.
struct Compute {
  double forward = 0, backward = 0;
};

// What one pass takes, in each direction.
struct Passed {
  double forward, backward;
};

class Step {
 public:
  // Of the depth and width that were asked for. The optimizer is the caller's, and does nothing.
  Step(Bench &bench, const fsdp_model_options &options);

  // From the first unshard to the update window.
  Passed pass(const Compute &times);
  void alone(const Compute &times) const;
  void update() { model_.check(fsdp_publish_weights(model_.model.get(), nullptr)); }
  // All gradients of rank r are r + 1, so their mean is known exactly. Returns how many main gradients differ from it.
  uint64_t check();
  AbiModel &model() { return model_; }

  static fsdp_model_options options(const Bench &bench);

 private:
  Bench &bench_;
  AbiModel model_;
  bool fill_ = false;
};

// The communication alone: the median of some passes without compute.
Passed calibrate(Bench &bench, Step &step, int passes = 9);
// Request::compute times the communication. If nothing moves in the forward pass, it still computes for half as long as
// the backward pass.
Compute compute_beside(const Bench &bench, const Passed &communication);

}  // namespace perf
