// SPDX-License-Identifier: Apache-2.0
// Chooses the fastest way to copy a number of bytes on this processor. A table has the ways for processors that were
// measured. On other processors the first copies are timed.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace fsdp::device::kernels {

enum class CopyWay : uint8_t {
  past_caches,  // like `pages`, but written with non-temporal stores
  library,      // memcpy
  pages,        // vectors on several pages side by side
  string        // rep movsb
};
inline constexpr uint32_t copy_ways = 4;
inline constexpr size_t min_chosen_bytes = size_t{64} << 10;  // shorter copies use memcpy

struct Processor {
  enum class Vendor : uint8_t { other, intel, amd } vendor = Vendor::other;
  uint32_t family = 0, model = 0;
  bool fast_strings = false;  // the processor reports that rep movsb is fast (ERMS)
};

// Asks the processor what it is. On architectures other than x86-64 all fields keep their defaults.
Processor identify_processor() noexcept;
// Returns the way for a copy of at least min_chosen_bytes, or nothing if the processor is not in the table.
std::optional<CopyWay> find_measured_way(const Processor &processor, size_t bytes) noexcept;
// Returns the ways that may be the fastest for such a copy on a processor that is not in the table.
std::span<const CopyWay> list_copy_ways(const Processor &processor, size_t bytes) noexcept;

class CopyTrial;

struct CopyChoice {
  CopyWay way;
  CopyTrial *trial = nullptr;  // the caller tells it the time of this copy; NULL: no time is needed
};

// Finds the fastest way for copies of about the same size. They use one way after the other, about `copies_per_way`
// times each. The median of the times per byte counts: some copies take longer because of page faults and
// interruptions, and some are short because their source happens to be in the caches. Several threads may use a trial
// at once.
class CopyTrial {
 public:
  static constexpr uint32_t copies_per_way = 4;

  explicit CopyTrial(std::span<const CopyWay> ways) : ways_(ways) {}
  // Returns the way of the next copy, and this trial if it needs the time of that copy.
  CopyChoice next() noexcept;
  // Takes the time of a copy that next() asked for.
  void note(CopyWay way, size_t bytes, std::chrono::nanoseconds time) noexcept;

 private:
  struct Times {
    std::atomic<uint32_t> count = 0;
    std::array<std::atomic<uint32_t>, copies_per_way> rates{};  // ps per KiB; 0: not known yet
    uint32_t median() const noexcept;
  };

  CopyWay find_fastest() const noexcept;
  const Times &of(CopyWay way) const noexcept { return times_[static_cast<size_t>(way)]; }

  const std::span<const CopyWay> ways_;
  std::atomic<uint32_t> begun_ = 0, ended_ = 0;  // numbers of copies
  std::array<Times, copy_ways> times_;
  std::atomic<uint32_t> found_ = copy_ways;  // number of the fastest way; copy_ways: not known yet
};

// The trials of one processor. Sizes that differ by more than an eighth have different trials.
class CopyTrials {
 public:
  explicit CopyTrials(const Processor &processor);
  CopyTrial &for_size(size_t bytes) noexcept { return *trials_[number_of(bytes)]; }

  // The number of the trial for at least min_chosen_bytes. From 1 GiB on, all sizes have the last trial.
  static size_t number_of(size_t bytes) noexcept;
  static size_t min_bytes(size_t number) noexcept;
  static constexpr size_t count = size_t{14} * 8 + 1;

 private:
  std::array<std::optional<CopyTrial>, count> trials_;
};

CopyChoice choose_copy(size_t bytes) noexcept;
void copy_by(CopyWay way, void *to, const void *from, size_t bytes);
// Copies with rep movsb, or with memcpy if there is no such instruction.
void copy_string(void *to, const void *from, size_t bytes) noexcept;

}  // namespace fsdp::device::kernels
