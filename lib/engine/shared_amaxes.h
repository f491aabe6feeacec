// SPDX-License-Identifier: Apache-2.0
// Scales of parameters that have one each: made of the largest magnitude that any rank has of them. All are found at
// once, whenever weights are published.
//
//   amaxes (each rank, on the caller's stream)  ->  those of all ranks that hold slots  ->  scales and their inverses
//
// As shares of norms they travel in a meeting of the callers, or on the streams of the library (gather_values.h).
#pragma once

#include <cstdint>

#include "engine/runtime.h"

namespace fsdp::engine {

class SharedAmaxes {
 public:
  explicit SharedAmaxes(Runtime &runtime);

  // Of this rank; 0 for ever of a parameter that it has nothing of.
  float *own(uint64_t index) const { return own_ + index; }
  const float *scale(uint64_t index) const { return scales_ + index; }
  const float *inverse(uint64_t index) const { return inverses_ + index; }
  // Collective over the holders. This rank's were written on the caller's stream; what follows on that has the scales.
  void find_scales(device::Stream &caller);

 private:
  device::Stream &gather(uint64_t first, uint64_t count, device::Stream &caller);

  Runtime &runtime_;
  const uint64_t count_;
  float *own_, *all_, *scales_, *inverses_;
};

}  // namespace fsdp::engine
