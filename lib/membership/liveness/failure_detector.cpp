// SPDX-License-Identifier: Apache-2.0

#include "membership/liveness/failure_detector.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/failure.h"
#include "base/text.h"

namespace fsdp::membership {
namespace {

// At most a tenth of the limit; with the usual limit there are four heartbeats a second.
uint32_t interval_of(uint32_t limit_ms) { return std::min(limit_ms / 10, std::clamp(limit_ms / 32, 250u, 300u)); }

}  // namespace

Pulse::Pulse(Control &control, uint32_t rank, uint32_t limit_ms, const std::optional<std::vector<uint32_t>> &neighbours)
    : control_(control),
      rank_(rank),
      limit_ms_(std::max(limit_ms, least_limit_ms)),
      interval_ms_(interval_of(limit_ms_)),
      seen_(neighbours ? neighbours->size() : control.world_size()) {
  for (uint32_t i = 0; i < seen_.size(); ++i) seen_[i].rank = neighbours ? (*neighbours)[i] : i;
}

void Pulse::look() noexcept {
  const uint64_t now = steady_ms() + 1;
  if (now - looked_ms_ < interval_ms_) return;
  const auto watched = static_cast<uint32_t>(std::min<uint64_t>(now - looked_ms_, 2 * interval_ms_));
  looked_ms_ = now;
  control_.beat(rank_, now);
  for (Seen &seen : seen_) {
    const uint64_t beat = control_.last_beat(seen.rank);
    const uint32_t silent = seen.silent_ms.load(std::memory_order_relaxed);
    // A rank that has never sent a heartbeat has no monitor yet, or is on another node.
    const bool beats = beat != seen.beat || beat == 0;
    seen.silent_ms.store(beats ? 0 : std::min(silent + watched, UINT32_MAX / 2), std::memory_order_relaxed);
    seen.beat = beat;
  }
}

// Ranks that stop at the same time reach the limit some intervals apart, because heartbeats and looks are an interval
// apart. One report names them all.
std::vector<uint32_t> Pulse::silent(const std::function<bool(uint32_t)> &concerns) const {
  bool over = false;
  std::vector<uint32_t> ranks;
  for (const Seen &seen : seen_) {
    const uint32_t rank = seen.rank, silent = seen.silent_ms.load(std::memory_order_relaxed);
    if (rank == rank_ || silent < limit_ms_) continue;
    if (control_.membership(rank) != Membership::member || !concerns(rank)) continue;
    over = over || silent >= limit_ms_ + 3 * interval_ms_;
    ranks.push_back(rank);
  }
  if (!over) ranks.clear();
  return ranks;
}

bool Pulse::misses_beat(uint32_t rank) const noexcept {
  const auto seen = std::ranges::lower_bound(seen_, rank, {}, &Seen::rank);  // sorted by rank
  return seen != seen_.end() && seen->rank == rank && is_late(*seen);
}

bool Pulse::is_late(const Seen &seen) const noexcept {
  return seen.rank != rank_ && seen.silent_ms.load(std::memory_order_relaxed) >= interval_ms_ &&
         control_.membership(seen.rank) == Membership::member;
}

std::string name_process(uint32_t rank, int32_t process, const std::string &host) {
  if (process == 0) return format_text("{} (host {})", rank, host);  // the rank stopped before it introduced itself
  return format_text("{} (pid {}, host {})", rank, process, host);
}

std::string silence_text(const std::vector<std::string> &names, uint32_t limit_ms) {
  const bool one = names.size() == 1;
  return format_text("{} {} {} not responded for {:.1f} s: {} stopped or {} host is overloaded", one ? "rank" : "ranks",
                     fmt::join(names, ", "), one ? "has" : "have", limit_ms / 1e3, one ? "it is" : "they are",
                     one ? "its" : "their");
}

std::string Pulse::text(const std::vector<uint32_t> &ranks) const {
  std::vector<std::string> names;
  for (const uint32_t rank : ranks) names.push_back(name_process(rank, control_.process(rank), control_.host(rank)));
  return silence_text(names, limit_ms_);
}

namespace {

// The number that follows this name at the beginning of a line. A line may be longer than one read; the rest of a line
// does not begin with such a name.
std::optional<int> read_field(const char *path, const char *name) noexcept {
  const std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen(path, "re"), std::fclose);
  if (!file) return {};
  char line[256];
  while (std::fgets(line, sizeof line, file.get())) {
    int number = 0;
    if (std::strncmp(line, name, std::strlen(name)) == 0 && std::sscanf(line + std::strlen(name), "%d", &number) == 1)
      return number;
  }
  return {};
}

}  // namespace

bool is_dumping_core(const Fd &process, const char *proc) noexcept {
  char path[PATH_MAX];
  std::snprintf(path, sizeof path, "%s/self/fdinfo/%d", proc, process.get());
  const std::optional<int> number = read_field(path, "Pid:");
  if (!number || *number <= 0) return false;  // the process has been waited for, or is in another namespace
  std::snprintf(path, sizeof path, "%s/%d/status", proc, *number);
  return read_field(path, "CoreDumping:").value_or(0) == 1;
}

void Deaths::find(const Control &control, Links &links, const Pulse &pulse, const RankSet &known) {
  const auto ended = [&](uint32_t rank) {
    const Membership state = control.membership(rank);
    if (state != Membership::left && state != Membership::gone && !known.contains(rank)) ranks_.add(rank);
  };
  links.find_dead(std::ref(ended));  // std::ref avoids an allocation, because waits call this function
  pulse.find_late([&](uint32_t rank) {
    if (ranks_.contains(rank) || known.contains(rank) || !links.dumps_core(rank)) return;
    ranks_.add(rank);
    dumping_.add(rank);
  });
}

Accusation Deaths::accuse(const std::string &where, const Control &control) const {
  RankSet ended;
  std::vector<std::string> dumping;
  for (const uint32_t rank : ranks_.list())
    if (dumping_.contains(rank))
      dumping.push_back(name_process(rank, control.process(rank), control.host(rank)));
    else
      ended.add(rank);
  std::string what = ended.empty() ? "" : death_text(ended);
  if (!dumping.empty()) what += (what.empty() ? "" : "; ") + dump_text(dumping);
  return accuse_dead(where, ranks_, what);
}

std::string dump_text(const std::vector<std::string> &names) {
  const bool one = names.size() == 1;
  return format_text("{} {} {} dumping core", one ? "rank" : "ranks", fmt::join(names, ", "), one ? "is" : "are");
}

}  // namespace fsdp::membership
