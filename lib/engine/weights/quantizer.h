// SPDX-License-Identifier: Apache-2.0
// Compute weights that are codes with scales, made of main weights when these are published. A rank's part of a
// parameter is whole granules, so no scale of a block needs what another rank has; one of a whole parameter does.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/weights/block_work.h"
#include "engine/weights/shared_values.h"

namespace fsdp::engine {

// Tells of quantized parameters whose main weights are not finite as they are published, which no call refuses: the
// scales show it, so that publishing reads nothing more. On a device the words come at the end of the first call in
// the context that finds the work done, or with the model's end; no call waits for it.

class NonfiniteWeights final : public Unsettled {
 public:
  explicit NonfiniteWeights(Runtime &runtime);
  ~NonfiniteWeights() override;
  NonfiniteWeights(const NonfiniteWeights &) = delete;
  NonfiniteWeights &operator=(const NonfiniteWeights &) = delete;
  // In the order of what follows, each of which is of this rank's part of a parameter.
  void add(const PlaneSlice &main, const device::Mxfp8Quantize &work);
  void add(const PlaneSlice &main, const device::Fp8BlockQuantize &work);
  void add_amax(const PlaneSlice &main, uint64_t index);

  // Behind what has quantized them on the stream. amaxes: this rank's, of all parameters with one scale.
  void count(device::Stream &stream, const float *amaxes);
  // Tells of the last count, once, if its work is done. Any thread.
  void settle() noexcept override;

 private:
  struct Counted {
    std::string name;
    uint64_t scales;  // of MXFP8, of which so many were looked at; 0: numbers are counted
    device::Mxfp8Quantize mxfp8;
    device::Fp8BlockQuantize blocks;
  };
  struct Measured {
    std::string name;
    uint64_t index;
  };
  void enqueue(device::Stream &stream, const float *amaxes);
  void report() noexcept;
  const char *quantized_weights() const;
  void report_counts() const;
  void report_amaxes() const;

  Runtime &runtime_;
  std::vector<Counted> counted_;
  std::vector<Measured> measured_;
  uint64_t *found_;   // counts, where kernels write them: in memory of the device
  uint64_t *counts_;  // ... and where the host reads them, all copied at once
  float *amaxes_;
  std::unique_ptr<device::Event> done_;
  std::mutex mutex_;
  uint64_t version_ = 0;  // whose counts are under way or to be told; 0: none
};

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
