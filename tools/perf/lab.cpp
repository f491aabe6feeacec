// SPDX-License-Identifier: Apache-2.0
#include "perf/lab.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <ctime>
#include <stdexcept>
#include <system_error>

namespace perf {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex(std::atomic<uint32_t> &word, int operation, uint32_t value) {
  const timespec limit{0, 50'000'000};
  ::syscall(SYS_futex, &word, operation, value, operation == FUTEX_WAIT ? &limit : nullptr, nullptr, 0);
}

}  // namespace

LabMemory *create_lab_memory() {
  void *memory =
      ::mmap(nullptr, sizeof(LabMemory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "memory shared by the ranks");
  return static_cast<LabMemory *>(memory);  // zeros are its initial state
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void Lab::pass(LabMemory::Word &arrived, LabMemory::Word &generation, bool sleeps) {
  const uint32_t mine = generation.value.load();
  if (arrived.value.fetch_add(1) + 1 == size_) {
    arrived.value.store(0);
    generation.value.fetch_add(1);
    if (sleeps) futex(generation.value, FUTEX_WAKE, INT_MAX);
    return;
  }
  for (uint32_t tries = 0; generation.value.load(std::memory_order_acquire) == mine; ++tries) {
    if (memory_.failed.load()) throw std::runtime_error("another rank failed");
    if (tries < 2000) {
      relax();
    } else if (sleeps) {
      futex(generation.value, FUTEX_WAIT, mine);
    } else {
      ::sched_yield();
    }
  }
}

// A rank that waits long sleeps, so that it takes no core from ranks that work; the second half then starts all at
// once.
void Lab::meet() {
  pass(memory_.arrived, memory_.generation, true);
  pass(memory_.left, memory_.passed, false);
}

double Lab::longest(double mine) {
  memory_.seconds[rank_] = mine;
  meet();
  const double result = *std::max_element(memory_.seconds, memory_.seconds + size_);
  meet();
  return result;
}

uint64_t Lab::sum(uint64_t mine) {
  memory_.counts[rank_] = mine;
  meet();
  uint64_t result = 0;
  for (uint32_t r = 0; r < size_; ++r) result += memory_.counts[r];
  meet();
  return result;
}

void *Lab::share_handle(void *mine) {
  if (rank_ == 0) memory_.handle = mine;
  meet();
  void *result = memory_.handle;
  meet();
  return result;
}

double Lab::time(const std::function<void()> &work, uint64_t repeats) {
  meet();
  // Work that was measured in between has filled the caches.
  for (uint64_t i = 0; i < repeats / 8; ++i) work();
  meet();
  const double start = now();
  for (uint64_t i = 0; i < repeats; ++i) work();
  const double seconds = now() - start;
  return longest(seconds) / static_cast<double>(repeats);
}

uint64_t Lab::repeats(const std::function<void()> &work, double seconds) {
  uint64_t repeats = 1;
  for (;;) {
    const double one = std::max(time(work, repeats), 1e-9);
    const auto wanted = static_cast<uint64_t>(std::ceil(seconds / one));
    if (wanted <= 4 * repeats) return std::max<uint64_t>(wanted, 1);
    repeats = std::min<uint64_t>(wanted, 100 * repeats);
  }
}

double Lab::flag_one_way(uint64_t round_trips) {
  meet();
  const double start = now();
  if (rank_ < 2 && size_ > 1) {
    std::atomic<uint32_t> &mine = (rank_ ? memory_.pong : memory_.ping).value,
                          &theirs = (rank_ ? memory_.ping : memory_.pong).value;
    const uint32_t first = mine.load();
    for (uint32_t i = 1; i <= round_trips; ++i) {
      if (rank_ == 0) mine.store(first + i, std::memory_order_release);
      for (uint32_t tries = 0; theirs.load(std::memory_order_acquire) != first + i; ++tries) {
        if (memory_.failed.load(std::memory_order_relaxed)) throw std::runtime_error("another rank failed");
        if (tries > 1000) ::sched_yield();  // the other rank may need this core
      }
      if (rank_ == 1) mine.store(first + i, std::memory_order_release);
    }
  }
  return longest(now() - start) / 2 / static_cast<double>(round_trips);
}

}  // namespace perf
