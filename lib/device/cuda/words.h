// SPDX-License-Identifier: Apache-2.0
// Numbers in pinned memory of the host. Streams of the GPU write them, so that the host sees how far the streams are
// without asking CUDA. Or streams wait for them, so that the host can let the streams go on without calling CUDA.
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
  // Notes that the last count that a stream was told to write is this one.
  void expect(uint32_t count) noexcept { expected.store(uint64_t{1} << 32 | count, std::memory_order_relaxed); }
  bool reached(uint32_t count) const noexcept {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - count) >= 0;
  }
  uint32_t last() const noexcept { return static_cast<uint32_t>(expected.load(std::memory_order_relaxed)); }
  bool written() const noexcept { return expected.load(std::memory_order_relaxed) >> 32 == 0 || reached(last()); }
  CUdeviceptr address() const noexcept {
    return reinterpret_cast<CUdeviceptr>(&value);
  }  // unified addressing: the same

  // For larger counts another word is used: events share counts, and may be asked about them much later.
  static constexpr uint32_t most = 0x7fff0000;

  std::atomic<uint64_t> expected{0};  // the last expected count, with bit 32 set; 0: none is expected
};

// A word, and the count that a stream was told to write to the word.
struct AwaitedWord {
  const PinnedWord *word = nullptr;
  uint32_t count = 0;
  bool written() const noexcept { return word->reached(count); }
};

// May be used by any thread. A word that was given back is given out again, with its old value, once streams have
// written all that they were told to write to it.
class WordPool {
 public:
  explicit WordPool(const Core &core) : core_(core) {}
  WordPool(const WordPool &) = delete;
  WordPool &operator=(const WordPool &) = delete;

  PinnedWord *take();
  // A word that has reached its largest count is not given out again.
  void give_back(PinnedWord *word) noexcept;
  // The GPU may read this word for ever: its memory is never used for anything else, not even after the device's end.
  void abandon(PinnedWord *word) noexcept;
  // The counts that streams have still to write, in all words.
  std::vector<AwaitedWord> unwritten();
  bool all_written() noexcept;
  uint64_t bytes() noexcept;
  // Called at the end, when no stream has a word to write or to wait for: the core gives the memory of the words back.
  // Pages with an abandoned word are left where they are.
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
  std::vector<PinnedWord *> free_, late_;  // late_: words that were given back, but streams have yet to write to them
};

}  // namespace fsdp::device::cuda
