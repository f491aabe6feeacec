// SPDX-License-Identifier: Apache-2.0
// Memory for tests of the CUDA kernels: memory of this process in the simulation (unit), and memory of a GPU in
// tests/gpu/kernels. The tests are the same.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "device/cuda/kernels.h"

namespace fsdp::test {

// Each test program defines these functions.
namespace gpu {
void *allocate(size_t bytes);  // aligned to 256
void release(void *memory);
void copy(void *to, const void *from, size_t bytes);  // copies either way, after all work that was enqueued
device::cuda::kernels::Stream stream();
}  // namespace gpu

// Allocates bytes in the GPU's memory, `offset` bytes after an aligned address, between guard bytes that must not
// change.
class OnGpu {
 public:
  explicit OnGpu(size_t bytes, size_t offset = 0) : bytes_(bytes), offset_(guard + offset) {
    memory_ = static_cast<std::byte *>(gpu::allocate(offset_ + bytes_ + guard));
    const std::vector<std::byte> untouched(offset_ + bytes_ + guard, mark);
    gpu::copy(memory_, untouched.data(), untouched.size());
  }
  OnGpu(const void *from, size_t bytes, size_t offset = 0) : OnGpu(bytes, offset) { gpu::copy(data(), from, bytes); }
  ~OnGpu() { gpu::release(memory_); }
  OnGpu(const OnGpu &) = delete;
  OnGpu &operator=(const OnGpu &) = delete;

  std::byte *data() { return memory_ + offset_; }
  float *floats() { return reinterpret_cast<float *>(data()); }

  std::vector<std::byte> read() {
    std::vector<std::byte> all(offset_ + bytes_ + guard);
    gpu::copy(all.data(), memory_, all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      const bool outside = i < offset_ || i >= offset_ + bytes_;
      EXPECT_TRUE(!outside || all[i] == mark) << "byte " << i << " outside of " << bytes_ << " bytes from " << offset_;
    }
    return {all.begin() + static_cast<std::ptrdiff_t>(offset_),
            all.begin() + static_cast<std::ptrdiff_t>(offset_ + bytes_)};
  }

 private:
  static constexpr size_t guard = 256;
  static constexpr std::byte mark{0xa5};
  size_t bytes_, offset_;
  std::byte *memory_;
};

// Checks that a kernel was launched without an error.
#define ASSERT_LAUNCHED(call) ASSERT_EQ(call, 0)

}  // namespace fsdp::test
