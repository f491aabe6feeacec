// SPDX-License-Identifier: Apache-2.0
// Numbers in pinned memory of the host. Streams of the GPU write some of them, so that the host sees the progress of
// streams without calling CUDA. Streams wait for others, so that the host can let the streams continue without calling
// CUDA.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "device/cuda/driver.h"
#include "device/host/progress.h"

namespace fsdp::device::cuda {

struct Core;

// A growing number that has its own cache line. It is compared modulo 2^32, as the GPU does.
struct alignas(64) PinnedWord {
  Word value{0};
  // Notes `count` as the last count that a stream was told to write.
  void expect(uint32_t count) noexcept { expected.store(uint64_t{1} << 32 | count, std::memory_order_relaxed); }
  bool reached(uint32_t count) const noexcept {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - count) >= 0;
  }
  uint32_t last() const noexcept { return static_cast<uint32_t>(expected.load(std::memory_order_relaxed)); }
  bool written() const noexcept { return expected.load(std::memory_order_relaxed) >> 32 == 0 || reached(last()); }
  CUdeviceptr address() const noexcept {
    return reinterpret_cast<CUdeviceptr>(&value);
  }  // with unified addressing the address is the same

  // Larger counts need another word, because events share counts, and may be queried much later.
  static constexpr uint32_t most = 0x7fff0000;

  std::atomic<uint64_t> expected{0};  // the last expected count, with bit 32 set; 0: none is expected
};

// A word, and the count that a stream will write to it.
struct AwaitedWord {
  const PinnedWord *word = nullptr;
  uint32_t count = 0;
  bool written() const noexcept { return word->reached(count); }
};

// May be used by any thread. A word that was given back is reused, with its old value, once streams have written all
// counts that they were told to write.
class WordPool {
 public:
  explicit WordPool(const Core &core) : core_(core) {}
  WordPool(const WordPool &) = delete;
  WordPool &operator=(const WordPool &) = delete;

  PinnedWord *take();
  // A word that has reached its largest count is not reused.
  void give_back(PinnedWord *word) noexcept;
  // Called if the GPU may read this word forever: its memory is never used for anything else, even after the device's
  // end.
  void abandon(PinnedWord *word) noexcept;
  // The counts that streams have not written yet, in all words.
  std::vector<AwaitedWord> unwritten();
  bool all_written() noexcept;
  uint64_t bytes() noexcept;
  // Called at the end, when no stream has a word to write or a word to wait for: the core gives the memory of the words
  // back. Pages with an abandoned word are left allocated.
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
  std::vector<PinnedWord *> free_, late_;  // late_: given back, but streams have yet to write to them
};

}  // namespace fsdp::device::cuda
