// SPDX-License-Identifier: Apache-2.0
// The heartbeats of the ranks of one node, as one of these ranks sees them. The monitor's thread beats and looks. So a
// rank whose caller computes for minutes is not silent, but a rank whose process is stopped is.
//
// Silence is counted in looks of this rank, never as a difference of clocks. If an observer was stopped itself, or its
// machine was suspended, it has not looked during that time, so the time does not count.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "membership/liveness/control.h"
#include "membership/liveness/links.h"
#include "membership/verdict.h"

namespace fsdp::membership {

class Pulse {
 public:
  static constexpr uint32_t default_limit_ms = 8000, least_limit_ms = 1000;

  // `neighbours`: the ranks to observe; empty: all ranks.
  Pulse(Control &control, uint32_t rank, uint32_t limit_ms,
        const std::optional<std::vector<uint32_t>> &neighbours = std::nullopt);

  // look() must be called at least once in this period.
  uint32_t interval_ms() const noexcept { return interval_ms_; }
  uint32_t limit_ms() const noexcept { return limit_ms_; }
  // If it is time, beats and looks at the others' heartbeats.
  void look() noexcept;

  // The members for which `concerns` is true and that have been silent for the limit. Empty until one of them has been
  // silent for some intervals more, because ranks that stop at the same time are one failure. Any thread may call it.
  std::vector<uint32_t> silent(const std::function<bool(uint32_t)> &concerns) const;
  // Is a heartbeat of this member late? It is if the last look found no new one.
  bool misses_beat(uint32_t rank) const noexcept;
  // Calls `found` for each member whose heartbeat is late.
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
  std::vector<Seen> seen_;  // fixed in memory
};

// "3 (pid 77, host a)"
std::string name_process(uint32_t rank, int32_t process, const std::string &host);
std::string silence_text(const std::vector<std::string> &names, uint32_t limit_ms);

// Finds ranks of this host that have died: their process has ended, or has crashed and is writing its core.

// Is a process writing its core? Until the core is written, which takes minutes if the process has much memory, the
// process neither beats nor ends: its pidfd shows it as alive, and its connections stay open.

// `process` is a pidfd, because a process number may belong to another namespace or to a later process. Also false if
// the kernel does not tell: before Linux 4.15, or if /proc shows the process only to its own user. Reads two files.
// `proc`: the mount point of /proc.
bool is_dumping_core(const Fd &process, const char *proc = "/proc") noexcept;

class Deaths {
 public:
  // Looks for dead ranks among those that have not left the job and are not `known`. May be called again; keeps earlier
  // findings. Only ranks whose heartbeats are late are checked for a core dump.
  void find(const Control &control, Links &links, const Pulse &pulse, const RankSet &known = {});
  bool empty() const noexcept { return ranks_.empty(); }
  const RankSet &ranks() const noexcept { return ranks_; }
  // "reduce_scatter of 'layer.3' (#17): rank 5 died; rank 3 (pid 77, host a) is dumping core"
  Accusation accuse(const std::string &where, const Control &control) const;

 private:
  RankSet ranks_, dumping_;
};

// "rank 3 (pid 77, host a) is dumping core"
std::string dump_text(const std::vector<std::string> &names);

}  // namespace fsdp::membership
