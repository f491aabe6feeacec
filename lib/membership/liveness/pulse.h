// SPDX-License-Identifier: Apache-2.0
// The heartbeats of the ranks of one node, as one of them sees them. Beaten and looked at by the monitor's thread, so a
// rank whose caller computes for minutes is not silent; one whose process is stopped is.
//
// Silence is counted in looks of this rank, never as a difference of clocks: an observer that was stopped itself, or a
// machine that was suspended, has not looked, and starts to count anew.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "membership/liveness/control.h"

namespace fsdp::membership {

class Pulse {
 public:
  static constexpr uint32_t default_limit_ms = 8000, least_limit_ms = 1000;

  // neighbours: the ranks that it looks at; empty: all ranks.
  Pulse(Control &control, uint32_t rank, uint32_t limit_ms,
        const std::optional<std::vector<uint32_t>> &neighbours = std::nullopt);

  // How often look() wants to be called, at least.
  uint32_t interval_ms() const noexcept { return interval_ms_; }
  uint32_t limit_ms() const noexcept { return limit_ms_; }
  // Beats, and looks at the others' beats, if it is time.
  void look() noexcept;

  // Any thread. Of the members that concern the caller: those that have been silent for the limit, some intervals after
  // the first of them, since ranks that stop at the same time are one failure.
  std::vector<uint32_t> silent(const std::function<bool(uint32_t)> &concerns) const;
  // A beat of this member is late, by more than it may be where nothing is wrong.
  bool misses_beat(uint32_t rank) const noexcept;
  // Calls for each member of which that is so.
  template <class Found>
  void find_late(Found &&found) const {
    for (const Seen &seen : seen_)
      if (is_late(seen)) found(seen.rank);
  }
  // "rank 3 (pid 77, host a) has not responded for 8.0 s: it is stopped or its host is overloaded"
  std::string text(const std::vector<uint32_t> &ranks) const;

 private:
  struct Seen {
    uint32_t rank = 0;
    uint64_t beat = 0;
    std::atomic<uint32_t> silent_ms{0};
  };
  bool is_late(const Seen &seen) const noexcept;

  Control &control_;
  uint32_t rank_, limit_ms_, interval_ms_;
  uint64_t looked_ms_ = 0;
  std::vector<Seen> seen_;  // never moves
};

// "3 (pid 77, host a)"
std::string name_process(uint32_t rank, int32_t process, const std::string &host);
std::string silence_text(const std::vector<std::string> &names, uint32_t limit_ms);

}  // namespace fsdp::membership
