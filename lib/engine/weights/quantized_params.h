// SPDX-License-Identifier: Apache-2.0
// Computes codes times scales of a whole parameter, on the host, one piece at a time. A parameter without main weights
// is read this way.
#pragma once

#include <memory>

#include "device/device.h"
#include "engine/runtime/runtime.h"
#include "memory/model_spec.h"

namespace fsdp::engine {

// The ROW planes of codes and scales, in memory of the host.
struct StoredRows {
  const std::byte *codes, *scales;
  fsdp_dtype scale_dtype;
};
// Writes the numbers to the caller's memory, each with one multiplication in fp32 and one rounding to the dtype.
void dequantize(device::Device &device, const memory::ParamSpec &param, const StoredRows &rows, std::byte *to,
                fsdp_dtype dtype);

// Loads numbers into the planes of a FROZEN quantized parameter, which has no main weights from which to make them.
// This rank's part of the numbers is kept as fp32 until all have arrived. So a load that fails midway leaves the planes
// as they were, and each block is made from all of its numbers.
//
//   numbers, a piece at a time --> fp32, this rank's part   --when all have come--> codes and scales, with the bits of
//                              \-> amax of all numbers, if there is one scale       a publish
class FrozenLoad {
 public:
  // `rows` are the numbers that this rank stores: whole blocks. May throw OUT_OF_MEMORY, without other effects.
  FrozenLoad(Runtime &runtime, const memory::ParamSpec &param, const ParamPlace &place, const layout::Slice &rows);
  // Takes numbers of the parameter, starting at element `first`. If the parameter has one scale, each number must come
  // once.
  void take(const std::byte *from, fsdp_dtype dtype, uint64_t first, uint64_t count);
  // Makes the planes, which are complete when it returns.
  void store();

 private:
  void measure(const std::byte *from, fsdp_dtype dtype, uint64_t count);
  void find_amax();
  void store_whole(device::Stream &stream);
  void store_blocks(device::Stream &stream);

  Runtime &runtime_;
  const memory::ParamSpec &param_;
  const ParamPlace place_;
  const layout::Slice rows_, scales_;  // the slices that this rank stores; for block scales only the begin is used
  const bool whole_;                   // one scale for all numbers, and this rank stores some of them
  const uint64_t piece_count_, piece_number_;
  std::unique_ptr<device::Memory> memory_;  // NULL: there is nothing to store
  float *values_ = nullptr, *piece_ = nullptr, *amaxes_ = nullptr;
  uint64_t in_piece_ = 0, pieces_ = 0;  // numbers in the present piece, and pieces measured so far
};

}  // namespace fsdp::engine
