// SPDX-License-Identifier: Apache-2.0
// Brings segments of the home file to memory, one after the other, and writes them back. One thread reads ahead and one
// writes behind, so the disk works while the caller updates a segment. The segments use a few buffers in turn
// (memory/home_plan.h).
//
//   reader   | read k + 1   |
//   caller   | update k     |
//   writer   | write k - 1  |
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/runtime/home_thread.h"
#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// A run of elements of a bucket, numbered as in its planes of main weights and states: this rank's shard.
struct HomeSegment {
  const Bucket *bucket = nullptr;
  uint64_t begin = 0, end = 0;
  bool writes = false;  // are its planes, other than gradients, written back?
};

// A segment in memory.
struct HomeView {
  HomeSegment segment;
  std::vector<HomePages> pages;    // all that are read
  std::vector<HomePages> written;  // those that are written back

  // Replaces an address in the file by its place in memory. An address outside of the file stays as it is.
  template <class T>
  void bring(T *&address, const HomeFile &file) const {
    if (!file.contains(address)) return;
    const uint64_t offset = file.offset_of(address);
    for (const HomePages &some : pages)
      if (offset >= some.offset && offset < some.offset + some.bytes) {
        address = reinterpret_cast<T *>(some.memory + (offset - some.offset));
        return;
      }
    fail(FSDP_INTERNAL, "byte {} of the home file is not in the segment", offset);
  }
};

class HomeTurns {
 public:
  // Requires that the model has planes in a file.
  explicit HomeTurns(Runtime &runtime);
  HomeTurns(const HomeTurns &) = delete;
  HomeTurns &operator=(const HomeTurns &) = delete;

  using Takes = bool (*)(const memory::PlanePlan &plane);
  // Begins to read, of each segment, the planes for which `takes` is true. The segments must be sorted by bucket and
  // then by element. The list must not change until next() has returned NULL.
  void begin(std::span<const HomeSegment> segments, Takes takes);
  // Returns the next segment, once it is read. The previous segment is written back, after all work on it that the
  // caller has enqueued. Returns NULL when all segments are written. Blocks for the disk. Throws SYSTEM.
  const HomeView *next(device::Stream &caller);

 private:
  HomeView &turn(uint64_t segment) { return views_[segment % views_.size()]; }
  // Gives segments to the reader while turns are free.
  void give_segments();
  void fill(HomeView &view, const HomeSegment &segment, std::byte *memory) const;
  void add_pages(HomeView &view, size_t first, const Plane &plane, uint64_t begin, uint64_t end,
                 std::byte *&memory) const;
  void await(HomeThread &thread, uint64_t transfer);

  Runtime &runtime_;
  const HomeFile &file_;
  std::byte *memory_;
  uint64_t turn_bytes_;
  std::vector<HomeView> views_;  // by turn
  HomeThread reader_, writer_;   // transfer n + 1 is of segment n
  std::unique_ptr<device::Event> updated_;
  std::span<const HomeSegment> segments_;
  Takes takes_ = nullptr;
  // Numbers of segments: the first of this pass, the next that next() returns, and the next for the reader.
  uint64_t first_ = 0, next_ = 0, given_ = 0;
};

}  // namespace fsdp::engine
