// SPDX-License-Identifier: Apache-2.0
// What the ranks of a measurement share apart from the library: a barrier, and the numbers that each rank has found. It
// lies in anonymous shared memory, which is made before the ranks are.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace perf {

constexpr uint32_t max_ranks = 256;

struct LabMemory {
  struct alignas(64) Word {
    std::atomic<uint32_t> value;
  };
  Word arrived, generation;  // of meet()
  Word left, passed;         // of its second half
  Word ping, pong;           // flag_round_trip()
  std::atomic<bool> failed;
  double seconds[max_ranks];
  uint64_t counts[max_ranks];
  void *handle;  // passed from rank 0 to ranks in the same process
};

class Lab {
 public:
  Lab(LabMemory &memory, uint32_t rank, uint32_t size) : memory_(memory), rank_(rank), size_(size) {}
  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }

  // All ranks leave within a fraction of a microsecond of each other, if there are cores for all. Throws if a rank has
  // failed.
  void meet();
  double longest(double mine);  // over the ranks, the same on each
  uint64_t sum(uint64_t mine);
  void *share_handle(void *mine);  // rank 0's; ranks as threads only

  // Seconds of one run of `work`, over `repeats` of them, on the slowest rank; all ranks start at once.
  double time(const std::function<void()> &work, uint64_t repeats);
  // How often to repeat `work` for one measurement of about `seconds`; the same on each rank.
  uint64_t repeats(const std::function<void()> &work, double seconds);
  // Seconds in which a flag that rank 0 sets is seen by rank 1: half a round trip.
  double flag_one_way(uint64_t round_trips);

 private:
  void pass(LabMemory::Word &arrived, LabMemory::Word &generation, bool sleeps);

  LabMemory &memory_;
  uint32_t rank_, size_;
};

LabMemory *create_lab_memory();
double now();  // seconds

}  // namespace perf
