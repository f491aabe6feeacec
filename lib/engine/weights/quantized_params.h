// SPDX-License-Identifier: Apache-2.0
// Codes times scales of a whole parameter, on the host, a piece at a time: what is read of one that has no main
// weights.
#pragma once

#include <memory>

#include "device/device.h"
#include "engine/runtime/runtime.h"
#include "memory/model_spec.h"

namespace fsdp::engine {

// codes and scales: the ROW planes, in memory of the host; scales of that dtype. to: memory of the caller's.
struct StoredRows {
  const std::byte *codes, *scales;
  fsdp_dtype scale_dtype;
};
// One multiplication in fp32, and a rounding to the dtype.
void dequantize(device::Device &device, const memory::ParamSpec &param, const StoredRows &rows, std::byte *to,
                fsdp_dtype dtype);

// Numbers on their way into the planes of a FROZEN quantized parameter, which has no main weights to make them of. This
// rank's part of them is kept as fp32 until all have come. So a load that fails on the way leaves the planes as they
// were, and a block is made of all of its numbers.
//
//   numbers, a piece at a time --> fp32, this rank's part   --when all have come--> codes and scales, with the bits of
//                              \-> amax of all of them, where there is one scale    a publish

class FrozenLoad {
 public:
  // rows: what this rank stores of the numbers that come: whole blocks. OUT_OF_MEMORY without any other effect.
  FrozenLoad(Runtime &runtime, const memory::ParamSpec &param, const ParamPlace &place, const layout::Slice &rows);
  // Numbers of the parameter from element `first` on. Where it has one scale all come, each once.
  void take(const std::byte *from, fsdp_dtype dtype, uint64_t first, uint64_t count);
  // Makes the planes; done when it returns.
  void store();

 private:
  void measure(const std::byte *from, fsdp_dtype dtype, uint64_t count);
  void find_amax();
  void store_whole(device::Stream &stream);
  void store_blocks(device::Stream &stream);

  Runtime &runtime_;
  const memory::ParamSpec &param_;
  const ParamPlace place_;
  const layout::Slice rows_, scales_;  // what this rank stores; of block scales only where they begin
  const bool whole_;                   // there is one scale for all, and this rank stores something
  const uint64_t piece_count_, piece_number_;
  std::unique_ptr<device::Memory> memory_;  // NULL: there is nothing to store
  float *values_ = nullptr, *piece_ = nullptr, *amaxes_ = nullptr;
  uint64_t in_piece_ = 0, pieces_ = 0;  // numbers in the piece; pieces that were measured
};

}  // namespace fsdp::engine
