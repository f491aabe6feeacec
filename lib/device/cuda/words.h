// SPDX-License-Identifier: Apache-2.0
// Numbers in pinned memory of the host that streams of the GPU write (so that the host sees how far they are without
// asking CUDA) or wait for (so that the host can let them go on without calling CUDA).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda/driver.h"
#include "device/host/futex.h"

namespace fsdp::device::cuda {

// One number, alone on its cache line, growing and compared modulo 2^32 as the GPU does.
struct alignas(64) PinnedWord {
  Word value{0};
  bool reached(uint32_t count) const noexcept {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - count) >= 0;
  }
  CUdeviceptr address() noexcept { return reinterpret_cast<CUdeviceptr>(&value); }  // unified addressing: the same
};

// Any thread. Words are given out again with the value that they had.
class Words {
 public:
  explicit Words(const Checker &check) : check_(check) {}
  ~Words();
  Words(const Words &) = delete;
  Words &operator=(const Words &) = delete;

  PinnedWord *take();
  void give_back(PinnedWord *word) noexcept;
  // The GPU may still write or read this one: its memory is never used for anything else, not even after the device.
  void abandon(PinnedWord *word) noexcept;

 private:
  struct Page {
    PinnedWord *words;
    bool abandoned;
  };
  void add_page();

  const Checker &check_;
  std::mutex mutex_;
  std::vector<Page> pages_;
  std::vector<PinnedWord *> free_;
};

}  // namespace fsdp::device::cuda
