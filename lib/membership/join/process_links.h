// SPDX-License-Identifier: Apache-2.0
// Ranks as processes: each reads its own mailbox, a socket that every peer can write to, and has a pidfd of every peer.
#pragma once

#include <poll.h>

#include <mutex>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "membership/liveness/links.h"

namespace fsdp::membership {

// A socket pair, and this process: what a rank brings to the meeting.
struct Doors {
  Fd inbox;    // kept
  Fd outbox;   // passed to every peer
  Fd process;  // a pidfd, passed to every peer
};
Doors make_doors();

// What a rank has of a peer.
struct PeerDoors {
  uint32_t rank = 0;
  Fd process;
  Fd outbox;
};

class ProcessLinks final : public Links {
 public:
  // Of the other ranks of this host, in their order.
  ProcessLinks(uint32_t rank, Fd inbox, std::vector<PeerDoors> peers);

  bool send(uint32_t to_rank, Parcel parcel, const Fd &file) override;
  std::optional<Fd> take(Parcel parcel) override;
  void sleep(uint32_t ms) override;
  void find_dead(const std::function<void(uint32_t)> &found) override;
  std::optional<std::vector<uint32_t>> neighbours() const override { return poll_ranks_; }
  bool dumps_core(uint32_t rank) const noexcept override;
  std::optional<Fd> meet(Parcel parcel, std::span<const uint32_t> ranks, const std::function<Fd()> &create) override;

 private:
  void read_inbox();
  const PeerDoors *find(uint32_t rank) const noexcept;  // NULL: it is not on this host

  uint32_t rank_;
  Fd inbox_;
  std::vector<PeerDoors> peers_;
  std::vector<std::pair<Parcel, Fd>> arrived_;  // of other teams, or early
  std::mutex mutex_;                            // of polls_
  std::vector<pollfd> polls_;                   // of peers_
  std::vector<uint32_t> poll_ranks_;
};

}  // namespace fsdp::membership
