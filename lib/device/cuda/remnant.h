// SPDX-License-Identifier: Apache-2.0
// What CUDA gave and must get back. The calls that give it back may wait for all work of the GPU, so they are made only
// when the library's is done: what ends earlier is kept until then, and in the worst case for ever.
#pragma once

#include <cstdint>

#include "device/cuda/error.h"

namespace fsdp::device::cuda {

struct Core;

struct Remnant {
  enum Kind { memory, mapped_memory, addresses, pinned_memory, registered_memory, stream, event };
  Kind kind;
  void *handle;
  uint64_t bytes = 0;

  bool on_gpu() const noexcept { return kind == memory || kind == mapped_memory; }
};

// Success: it is gone. Otherwise it is as before, and what is sticky has failed the context.
cudaError_t end(const Remnant &remnant, const Core &core) noexcept;

}  // namespace fsdp::device::cuda
