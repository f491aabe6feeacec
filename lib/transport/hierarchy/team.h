// SPDX-License-Identifier: Apache-2.0
// Ranks of several hosts that agree on steps and send each other messages. What every rank must know goes through
// memory on each host and once over the wire: the first rank of each host speaks for it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/hierarchy/circles.h"
#include "transport/net.h"
#include "transport/team.h"

namespace fsdp::transport {

struct TeamPlaces {
  std::vector<uint32_t> ranks;               // of the job, in the team's order
  std::vector<std::vector<uint32_t>> hosts;  // team ranks of each host, in the order of their first
  uint32_t rank = 0;                         // of the team
  uint32_t host = 0;                         // this rank's, in `hosts`
};

// Messages alone, which free their buffers when the stream has come by.
inline constexpr CollectiveTraits hybrid_traits{.gathers_meet = true,
                                                .records_calls = false,
                                                .rounds_end_with_steps = true,
                                                .releases_tickets = false,
                                                .rounds_before_sending = false,
                                                .receives_slices = false};

class HybridTeam final : public Team {
 public:
  // near: this host's ranks of the team, NULL if this is the only one. key: the same on all ranks, and of nothing else.
  // circle: so many hosts meet at once; 0: as many as suits the team.
  HybridTeam(std::shared_ptr<Net> net, TeamPlaces places, std::unique_ptr<Team> near, uint64_t key,
             uint32_t circle = 0);

  const CollectiveTraits &traits() const noexcept override { return hybrid_traits; }
  bool spans_hosts() const noexcept override { return true; }
  uint32_t rank() const noexcept override { return places_.rank; }
  uint32_t size() const noexcept override { return static_cast<uint32_t>(places_.ranks.size()); }
  uint32_t world_rank(uint32_t r) const noexcept override { return places_.ranks[r]; }

  std::unique_ptr<Arena> create_arena(uint64_t bytes, std::span<const Range> writable, const std::string &what,
                                      View view) override;
  std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape) override;
  Ballot fold(const Ballot &mine, const char *what) override;
  void all_gather(const void *mine, uint64_t bytes, void *all, const char *what) override;
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine, const std::string &what) override;
  uint64_t meetings() const noexcept override { return meetings_; }
  // Of its own host alone: the verdict on others reaches it through them.
  void look(const std::string &what, bool waited) override {
    if (near_) near_->look(what, waited);
  }

 private:
  class Unbroken;
  bool speaks() const { return places_.hosts[places_.host].front() == places_.rank; }
  uint32_t host_count() const { return static_cast<uint32_t>(places_.hosts.size()); }
  std::byte *place_of(uint32_t host, uint64_t bytes) { return hosts_.data() + host * widest_ * bytes; }
  void gather_host(const void *mine, uint64_t bytes, const char *what);
  void gather_hosts(uint64_t bytes, const char *what);
  void spread(uint64_t bytes, void *all, const char *what);
  std::vector<uint32_t> speakers_of(const Circle &circle) const;
  uint64_t key_of(const Circle &circle, size_t level) const;
  std::vector<Ballot> meet(const Circle &circle, size_t level, const Ballot &mine, const char *what);

  std::shared_ptr<Net> net_;
  TeamPlaces places_;
  std::unique_ptr<Team> near_;
  uint64_t key_;
  uint64_t sequences_ = 0, meetings_ = 0;
  bool torn_ = false;               // a call ended by an error: hosts no longer agree on the number of meetings
  std::vector<Circle> circles_;     // of hosts, by their places in `hosts`
  std::vector<uint32_t> speakers_;  // ranks of the job, one for each host
  uint64_t widest_ = 0;             // ranks of the host that has most
  uint64_t room_;                   // of hosts_, in hosts
  std::vector<std::byte> hosts_;    // what the ranks of each say, widest_ of them
};

}  // namespace fsdp::transport
