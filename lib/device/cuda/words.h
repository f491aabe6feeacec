// SPDX-License-Identifier: Apache-2.0
// Numbers in pinned memory of the host. Streams of the GPU write them, so that the host sees how far they are without
// asking CUDA, or wait for them, so that the host can let them go on without calling CUDA.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "device/cuda/driver.h"
#include "device/host/progress.h"

namespace fsdp::device::cuda {

struct Core;

// One number, alone on its cache line, growing and compared modulo 2^32 as the GPU does.
struct alignas(64) PinnedWord {
  Word value{0};
  // A stream was told to write this count, as the last one.
  void expect(uint32_t count) noexcept { expected.store(uint64_t{1} << 32 | count, std::memory_order_relaxed); }
  bool reached(uint32_t count) const noexcept {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - count) >= 0;
  }
  uint32_t last() const noexcept { return static_cast<uint32_t>(expected.load(std::memory_order_relaxed)); }
  bool written() const noexcept { return expected.load(std::memory_order_relaxed) >> 32 == 0 || reached(last()); }
  CUdeviceptr address() const noexcept {
    return reinterpret_cast<CUdeviceptr>(&value);
  }  // unified addressing: the same

  // Counts beyond that take another word: events share counts for which they may be asked much later.
  static constexpr uint32_t most = 0x7fff0000;

  std::atomic<uint64_t> expected{0};  // bit 32: is anything?
};

// What a stream was told to write there.
struct AwaitedWord {
  const PinnedWord *word = nullptr;
  uint32_t count = 0;
  bool written() const noexcept { return word->reached(count); }
};

// Any thread. Words are given out again with the value that they had, once what streams were told is written.
class WordPool {
 public:
  explicit WordPool(const Core &core) : core_(core) {}
  WordPool(const WordPool &) = delete;
  WordPool &operator=(const WordPool &) = delete;

  PinnedWord *take();
  // One that has counted as far as it may is not given out again.
  void give_back(PinnedWord *word) noexcept;
  // The GPU may read this one for ever: its memory is never used for anything else, not even after the device.
  void abandon(PinnedWord *word) noexcept;
  // What streams have still to write, in all words.
  std::vector<AwaitedWord> unwritten();
  bool all_written() noexcept;
  uint64_t bytes() noexcept;
  // At the end, when no stream has one to write or to wait for: their memory is the core's to give back. Otherwise it
  // is left where it is.
  void hand_over(Core &core) noexcept;

 private:
  struct Page {
    PinnedWord *words;
    bool abandoned;
  };
  void add_page();
  void take_back_late();

  const Core &core_;
  std::mutex mutex_;
  std::vector<Page> pages_;
  std::vector<PinnedWord *> free_, late_;  // late: given back, and still to be written
};

}  // namespace fsdp::device::cuda
