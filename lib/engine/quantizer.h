// SPDX-License-Identifier: Apache-2.0
// Compute weights that are codes with scales, made of main weights when these are published. A rank's part of a
// parameter is whole granules, so no scale needs what another rank has.
#pragma once

#include <vector>

#include "engine/plane_slices.h"

namespace fsdp::engine {

class Quantizer {
 public:
  explicit Quantizer(const Runtime &runtime);
  // Of all quantized parameters, behind what the stream was given to write their main weights.
  void quantize(device::Stream &stream) const;

 private:
  void add(const Runtime &runtime, const PlaneSlice &main);

  // This rank's parts.
  std::vector<device::Mxfp8Quantize> mxfp8_;
  std::vector<device::Fp8BlockQuantize> blocks_;
};

}  // namespace fsdp::engine
