// SPDX-License-Identifier: Apache-2.0
// How the ranks of a job reach each other outside of shared memory: they pass descriptors and notice deaths. There are
// two implementations, for ranks as processes and for ranks as threads (join/rank_links.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/fd.h"

namespace fsdp::membership {

class Watch;

// Identifies a descriptor that is passed: the n-th of a team.
struct Parcel {
  uint64_t team;
  uint64_t number;
  bool operator==(const Parcel &) const = default;
};

class Links {
 public:
  virtual ~Links() = default;
  // Never waits for the receiver to read. Returns false if the receiver's mailbox is full at the moment.
  virtual bool send(uint32_t to_rank, Parcel parcel, const Fd &file) = 0;
  // The descriptor of this parcel, if it has arrived for this rank.
  virtual std::optional<Fd> take(Parcel parcel) = 0;
  // Sleeps until something may have arrived, at most `ms`.
  virtual void sleep(uint32_t ms) = 0;
  // Calls `found` for each rank that has died. Any thread may call it; it may find nothing if another thread is
  // looking.
  virtual void find_dead(const std::function<void(uint32_t)> &found) = 0;
  // The other ranks whose deaths these links can find; empty: unknown.
  virtual std::optional<std::vector<uint32_t>> neighbours() const { return std::nullopt; }
  // Is the process of that rank writing its core? Also false for ranks of other hosts, and if the kernel does not tell.
  virtual bool dumps_core(uint32_t) const noexcept { return false; }
  // Gives all these ranks the same file, which `create` makes on one of them. Returns nothing if the file does not
  // exist yet; the caller must then ask again.
  virtual std::optional<Fd> meet(Parcel parcel, std::span<const uint32_t> ranks, const std::function<Fd()> &create) = 0;
};

}  // namespace fsdp::membership
