// SPDX-License-Identifier: Apache-2.0
// Chooses the fastest way to copy this many bytes on this processor: by a table of processors that were measured, and
// on others by the times of the first copies.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace fsdp::device::kernels {

enum class CopyWay : uint8_t {
  library,      // memcpy
  pages,        // vectors on several pages side by side
  past_caches,  // like `pages`, but written with non-temporal stores
  string        // rep movsb
};
inline constexpr uint32_t copy_ways = 4;
inline constexpr size_t least_chosen_bytes = size_t{64} << 10;  // the library's way is taken below

struct Processor {
  enum class Vendor : uint8_t { other, intel, amd } vendor = Vendor::other;
  uint32_t family = 0, model = 0;
  bool fast_strings = false;  // says that rep movsb is fast
};

// The way for at least least_chosen_bytes; nothing if the processor is not in the table.
std::optional<CopyWay> find_measured_way(const Processor &processor, size_t bytes) noexcept;

class CopyTrial;

struct CopyChoice {
  CopyWay way;
  CopyTrial *trial = nullptr;  // wants the time of this copy
};

// Finds the fastest way for one range of sizes. Copies take the ways in turns until each way has had `rounds` of them.
// The least time per byte counts, because other times include page faults and other work. Any thread may copy.
class CopyTrial {
 public:
  static constexpr uint32_t rounds = 4;

  // Tries the first `ways` ways.
  explicit CopyTrial(uint32_t ways) : ways_(ways) {
    for (auto &least : least_) least = UINT64_MAX;
  }
  CopyChoice next() noexcept;
  void note(CopyWay way, size_t bytes, std::chrono::nanoseconds time) noexcept;

 private:
  const uint32_t ways_;
  std::atomic<uint32_t> begun_ = 0, ended_ = 0;
  std::array<std::atomic<uint64_t>, copy_ways> least_;  // ps per KiB
  std::atomic<uint32_t> found_ = copy_ways;             // the way's number, once it is known
};

CopyChoice choose_copy(size_t bytes) noexcept;
void copy_by(CopyWay way, void *to, const void *from, size_t bytes);
// Copies with rep movsb, or with memcpy if there is no such instruction.
void copy_string(void *to, const void *from, size_t bytes) noexcept;

}  // namespace fsdp::device::kernels
