// SPDX-License-Identifier: Apache-2.0
// How the ranks of a job reach each other outside of shared memory: descriptors are passed, deaths are seen.
// Two forms: ranks as processes (bootstrap/process_links) and as threads (bootstrap/local_job).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/fd.h"

namespace fsdp::membership {

class Watch;

// What a descriptor is: the n-th of a team.
struct Parcel {
  uint64_t team;
  uint64_t number;
  bool operator==(const Parcel &) const = default;
};

class Links {
 public:
  virtual ~Links() = default;
  // Never waits for the receiver to look. False: its mailbox is full at the moment.
  virtual bool send(uint32_t to_rank, Parcel parcel, const Fd &file) = 0;
  // What has come for this rank, if it has.
  virtual std::optional<Fd> take(Parcel parcel) = 0;
  // Sleeps until something may have come, at most `ms`.
  virtual void sleep(uint32_t ms) = 0;
  // The ranks that died: calls found for each. Any thread; may find nothing if another thread is looking.
  virtual void find_dead(const std::function<void(uint32_t)> &found) = 0;
  // The others whose deaths it sees; nothing: it does not say.
  virtual std::optional<std::vector<uint32_t>> neighbours() const { return std::nullopt; }
  // Is this rank's process writing its core? Not known of one on another host, or where the kernel does not tell.
  virtual bool dumps_core(uint32_t) const noexcept { return false; }
  // The same file for all ranks named: made by `create` on one of them. Empty: not there yet, ask again.
  virtual std::optional<Fd> meet(Parcel parcel, std::span<const uint32_t> ranks, const std::function<Fd()> &create) = 0;
};

}  // namespace fsdp::membership
