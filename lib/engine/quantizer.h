// SPDX-License-Identifier: Apache-2.0
// Compute weights that are codes with scales, made of main weights when these are published. A rank's part of a
// parameter is whole granules, so no scale of a block needs what another rank has; one of a whole parameter does.
#pragma once

#include <vector>

#include "engine/block_work.h"
#include "engine/nonfinite_weights.h"
#include "engine/plane_slices.h"
#include "engine/shared_amaxes.h"

namespace fsdp::engine {

class Quantizer {
 public:
  explicit Quantizer(Runtime &runtime);
  // Of all quantized parameters, behind what the stream was given to write their main weights. Collective where some
  // have one scale for all of their elements.
  void quantize(device::Stream &stream);

 private:
  // This rank's part of a parameter with one scale, which is that of this number.
  struct WholePart {
    device::Fp8Quantize work;
    uint64_t index;
  };
  struct ScaleCopy {
    std::byte *to;
    const float *from;
    uint64_t count;
  };
  void add(const Runtime &runtime, const PlaneSlice &main);
  void add_part(const PlaneSlice &main, bool via_bf16, uint64_t index);
  void add_scales(const Runtime &runtime, const Bucket &bucket, uint64_t first);
  void quantize_whole(device::Stream &stream);

  SharedAmaxes amaxes_;
  NonfiniteWeights nonfinite_;
  // This rank's parts.
  std::vector<BlockWork> blocks_;
  std::vector<WholePart> parts_;
  std::vector<ScaleCopy> scales_;  // of whole parameters that this rank publishes
};

}  // namespace fsdp::engine
