// SPDX-License-Identifier: Apache-2.0
// The heartbeats of the ranks of one node, as one of them sees them. The monitor's thread beats and looks. So a rank
// whose caller computes for minutes is not silent, but a rank whose process is stopped is.
//
// Silence is counted in looks of this rank, never as a difference of clocks. An observer that was stopped itself, or
// whose machine was suspended, has not looked meanwhile, so that time does not count.
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

  // neighbours: the ranks to look at; empty: all ranks.
  Pulse(Control &control, uint32_t rank, uint32_t limit_ms,
        const std::optional<std::vector<uint32_t>> &neighbours = std::nullopt);

  // The period at which look() is to be called, or more often.
  uint32_t interval_ms() const noexcept { return interval_ms_; }
  uint32_t limit_ms() const noexcept { return limit_ms_; }
  // Beats, and looks at the others' heartbeats, if it is time.
  void look() noexcept;

  // On any thread. The members that concern the caller and have been silent for the limit. Empty until one of them has
  // been silent for some intervals more, since ranks that stop at the same time are one failure.
  std::vector<uint32_t> silent(const std::function<bool(uint32_t)> &concerns) const;
  // A heartbeat of this member is late: at the last look there was no new one.
  bool misses_beat(uint32_t rank) const noexcept;
  // Calls found for each member whose heartbeat is late.
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
