// SPDX-License-Identifier: Apache-2.0
// Brings segments of the home file to memory, one after the other, and writes them back. One thread reads ahead and one
// writes behind, so the disk works while the caller updates a segment. The segments take turns with a few buffers
// (memory/home_plan.h).
//
//   reader   | read k + 1   |
//   caller   | update k     |
//   writer   | write k - 1  |
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

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// A run of elements of a bucket, as numbered in its planes of the optimizer.
struct HomeSegment {
  const Bucket *bucket = nullptr;
  uint64_t begin = 0, end = 0;
  bool writes = false;  // is it written back, but for gradients?
};

// The pages of a plane that have a segment's elements, and the place in a turn to which they come.
struct HomePart {
  const Plane *plane = nullptr;
  uint64_t offset = 0, bytes = 0;  // in the file
  std::byte *memory = nullptr;
};

// A segment in memory.
struct HomeView {
  HomeSegment segment;
  std::vector<HomePart> parts;

  // The place in memory of an address in the file. An address outside of the file stays as it is.
  template <class T>
  void bring(T *&address, const HomeFile &file) const {
    if (!file.contains(address)) return;
    const uint64_t offset = file.offset_of(address);
    for (const HomePart &part : parts)
      if (offset >= part.offset && offset < part.offset + part.bytes) {
        address = reinterpret_cast<T *>(part.memory + (offset - part.offset));
        return;
      }
    fail(FSDP_INTERNAL, "byte {} of the home file is not in the segment", offset);
  }
};

class HomeTurns {
 public:
  // Requires that the model has planes in a file.
  explicit HomeTurns(Runtime &runtime);
  // Waits a short time for the threads. A thread that the disk does not let go keeps what it needs, and is left behind.
  ~HomeTurns();
  HomeTurns(const HomeTurns &) = delete;
  HomeTurns &operator=(const HomeTurns &) = delete;

  using Takes = bool (*)(const memory::PlanePlan &plane);
  // Begins to read the planes that `takes` chooses of the segments, which must be sorted by bucket and then by element.
  // The list must not change until next() has returned NULL.
  void begin(std::span<const HomeSegment> segments, Takes takes);
  // Returns the next segment, once it is read. The segment before it is written back, after the caller's work on it
  // that is enqueued by now. Returns NULL when all segments are written. Blocks for the disk. Throws SYSTEM.
  const HomeView *next(device::Stream &caller);

 private:
  // What this object and its threads own together.
  struct FileWork {
    std::shared_ptr<HomeFile> file;
    std::shared_ptr<device::Memory> memory;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<HomeView> turns;
    // Numbers of segments: given to the reader, read, given to the writer, written.
    uint64_t given = 0, read = 0, updated = 0, written = 0;
    std::optional<Error> error;
    std::atomic<bool> ends = false;
    uint32_t threads = 0;  // that have not ended
  };
  template <bool reads>
  static void serve(FileWork &work);
  template <bool reads>
  static void *run(void *kept);
  template <bool reads>
  pthread_t start() const;

  HomeView &turn(uint64_t segment) const { return work_->turns[segment % work_->turns.size()]; }
  // Gives segments to the reader while turns are free.
  void give_segments();
  void fill(HomeView &view, const HomeSegment &segment, std::byte *memory) const;
  // Waits until `done`, which is called with the lock held.
  template <class Done>
  void await(Done done);

  Runtime &runtime_;
  std::shared_ptr<FileWork> work_;
  std::array<pthread_t, 2> threads_;
  std::unique_ptr<device::Event> updated_;
  std::byte *memory_;
  uint64_t turn_bytes_;
  std::span<const HomeSegment> segments_;
  Takes takes_ = nullptr;
  uint64_t first_ = 0, next_ = 0;  // the number of the first segment of this pass, and of the next segment
};

}  // namespace fsdp::engine
