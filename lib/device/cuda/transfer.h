// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "device/cuda/memory.h"
#include "device/cuda/stream.h"

namespace fsdp::device::cuda {

// Casts between memory of any kind, on the calling thread, after the earlier work on the caller's stream NULL. The cast
// is done when the call returns. The GPU makes the cast if it can reach both sides. Otherwise the host makes it, with
// its own kernels and the same bits, through two page-locked buffers: one is copied while the other is cast.
class Transfer {
 public:
  Transfer(Core &core, CallerStreams &callers);
  void operator()(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count);
  void load_kernels() { stream_.load_kernels(); }
  // Writes zeros.
  void clear(std::byte *data, uint64_t bytes);

 private:
  struct TypedCopy {
    std::byte *to;
    fsdp_dtype to_dtype;
    const std::byte *from;
    fsdp_dtype from_dtype;
    uint64_t count;
    TypedCopy part(uint64_t first, uint64_t elements) const;
  };
  struct StagingHalf {
    std::byte *data;
    std::unique_ptr<CudaEvent> copied;
  };

  bool on_gpu(const void *data, const char *what) const;
  void move(const TypedCopy &cast);
  void to_gpu(const TypedCopy &cast);
  void from_gpu(const TypedCopy &cast);
  void await(const CudaEvent &event) const { await_event(event, core_, core_.waiter); }

  Core &core_;
  CallerStreams &callers_;
  PinnedMemory bounce_;
  CudaEvent before_;
  std::array<StagingHalf, 2> halves_;
  LibraryStream stream_;  // the last member, so that its work is done before the other members are destroyed
};

}  // namespace fsdp::device::cuda
