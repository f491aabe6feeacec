// SPDX-License-Identifier: Apache-2.0
// A thread that moves pages between the home file and memory, so that a disk that does not answer blocks no other
// thread.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "engine/runtime/home_file.h"

namespace fsdp::engine {

// Bytes of the file, and the place in memory to which they come. Whole pages are read and written past the page cache;
// other bytes go through a buffer of HomeFile.
struct HomePages {
  uint64_t offset = 0, bytes = 0;  // in the file
  std::byte *memory = nullptr;
};

// Bytes that are read or written at once. Pieces are short, so that a slow disk is seen to move, and a thread that is
// to end need not finish its transfer.
inline constexpr uint64_t file_piece_bytes = uint64_t{8} << 20;
// How long a disk may move no byte. It is shorter than the context's timeout, so that this rank names the disk before
// its peers give up.
constexpr std::chrono::milliseconds disk_patience(uint32_t timeout_ms) {
  return std::chrono::milliseconds(uint64_t{timeout_ms} * 3 / 4);
}

class HomeThread {
 public:
  static constexpr uint64_t capacity = 16;  // number of transfers that may be begun and not done

  // `memory` has all pages to which the thread reads and from which it writes. `is_freed`: may the memory be freed
  // after the device? Memory of a GPU's runtime may not.
  HomeThread(const char *name, std::shared_ptr<HomeFile> file, std::shared_ptr<device::Memory> memory, bool is_freed);
  // Waits a short time for the thread. If the disk does not let it go, the thread keeps what it needs, and is left
  // behind.
  ~HomeThread();
  HomeThread(const HomeThread &) = delete;
  HomeThread &operator=(const HomeThread &) = delete;

  // These functions begin a transfer behind all earlier ones, and return its number, from 1 on. `pages` is copied.
  // They throw the thread's error if an earlier transfer has failed.
  uint64_t read(std::span<const HomePages> pages) { return begin(true, pages); }
  uint64_t write(std::span<const HomePages> pages) { return begin(false, pages); }
  bool done(uint64_t number) const;
  // Is the transfer done, or has the thread failed?
  bool ended(uint64_t number) const;
  // Blocks until the transfer is done, or `poll`, which is called about every 20 ms, returns false. Throws the thread's
  // error, or SYSTEM with ETIMEDOUT if the disk moves no byte for `longest`.
  void await(uint64_t number, std::chrono::milliseconds longest, auto &&poll) {
    while (!wait_a_little(number, longest) && poll()) continue;
  }

 private:
  struct PageMove {
    bool reads = false;
    std::vector<HomePages> pages;
  };
  // What this object and its thread own together.
  struct Work {
    std::shared_ptr<HomeFile> file;
    std::shared_ptr<device::Memory> memory;
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::array<PageMove, capacity> transfers;  // a ring: transfer n is at (n - 1) % capacity
    uint64_t begun = 0, done = 0;
    std::optional<Error> error;
    std::atomic<bool> ends = false;
    bool over = false;  // the thread has ended
  };
  // What a wait has seen of the disk.
  struct Motion {
    uint64_t number = 0, bytes = 0;
    std::chrono::steady_clock::time_point since;
  };
  static void *run(void *work);
  static void serve(Work &work);
  static void move(Work &work, const PageMove &transfer);
  uint64_t begin(bool reads, std::span<const HomePages> pages);
  // Returns whether the transfer is done.
  bool wait_a_little(uint64_t number, std::chrono::milliseconds longest);

  const bool is_freed_;
  std::shared_ptr<Work> work_;
  Motion motion_;
  pthread_t thread_;
};

}  // namespace fsdp::engine
