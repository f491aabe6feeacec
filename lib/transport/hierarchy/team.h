// SPDX-License-Identifier: Apache-2.0
// Ranks of several hosts that agree on steps and send each other messages. Data for every rank goes through memory on
// each host and only once over the network: the first rank of each host is its speaker, which exchanges for the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/exchange.h"
#include "transport/net.h"
#include "transport/team.h"

namespace fsdp::transport {

// How many hosts fold their ballots into one, or gather all their data. Neighbouring hosts form circles, the first
// hosts of these circles form circles again, and so on until one circle is left. Then the first hosts pass the result
// back. In a circle each host sends to all others, which takes the time of one message; a tree of pairs would take the
// time of several. If there are few hosts, they are one circle, and nothing is passed back.
//
//   17 hosts    [0 1 2 3] [4 5 6 7] ... [16]   ->   [0 4 8 12] [16]   ->   [0 16]   ->   back

// Each message takes a host some microseconds of a core, and each neighbour takes a connection. In circles of four a
// host has three neighbours for each level. This needs a third of the messages and connections of circles of 16, and
// takes no longer.
constexpr uint32_t circle_size_of(uint32_t host_count) { return host_count <= 16 ? 16 : 4; }

struct Circle {
  std::vector<uint32_t> hosts;  // in ascending order; the first host goes on to the next circle, if there is one
  uint64_t step = 1;            // the number of neighbouring hosts for which each of these hosts acts
  bool top = false;
};
// The circles of this host: the n-th circle has level n, and this host is the first one of all its circles except the
// last.
inline std::vector<Circle> circles_of(uint32_t host, uint32_t host_count, uint32_t size) {
  std::vector<Circle> circles;
  for (uint64_t step = 1;; step *= size) {  // distance of neighbours at this level
    Circle circle;
    const uint64_t first = host / (step * size) * (step * size);
    for (uint64_t h = first; h < std::min<uint64_t>(host_count, first + step * size); h += step)
      circle.hosts.push_back(static_cast<uint32_t>(h));
    circle.step = step;
    circle.top = step * size >= host_count;
    const bool last = circle.top || circle.hosts.front() != host;
    circles.push_back(std::move(circle));
    if (last) return circles;
  }
}

// The number of other hosts in this host's circles.
inline uint32_t neighbours_in_circles(uint32_t host, uint32_t host_count, uint32_t size) {
  uint32_t count = 0;
  for (uint64_t step = 1;; step *= size) {
    const uint64_t first = host / (step * size) * (step * size);
    const uint64_t end = std::min<uint64_t>(host_count, first + step * size);
    count += static_cast<uint32_t>((end - first + step - 1) / step) - 1;
    if (step * size >= host_count || first != host) return count;
  }
}

// meet(circle, level, ballot) returns the ballots of the circle's hosts in their order. pass(circle, level, ballot)
// returns the ballot of the circle's first host.
template <class Meet, class Pass>
Ballot fold_circles(const std::vector<Circle> &circles, Ballot mine, Meet &&meet, Pass &&pass, size_t level = 0) {
  const Circle &circle = circles[level];
  std::vector<Ballot> told = meet(circle, level, mine);
  Ballot folded = told.front();
  for (size_t i = 1; i < told.size(); ++i) folded.add(told[i]);
  if (circle.top) return folded;
  if (level + 1 < circles.size()) folded = fold_circles(circles, folded, meet, pass, level + 1);
  return circle.hosts.size() == 1 ? folded : pass(circle, level, folded);
}

// The room that gather_circles needs, counted in hosts. Each host of a circle has the same room.
inline uint64_t circle_room(uint32_t host_count, uint32_t size) {
  uint64_t step = 1;
  while (step * size < host_count) step *= size;
  return (host_count + step - 1) / step * step;
}

// Gathers the data of all hosts. At first, `all` has this host's `bytes` bytes at this host's place; at the end it has
// the data of all hosts. meet(circle, level, first, bytes) gathers `bytes` bytes from each host of the circle: the n-th
// host's bytes are at first + n * bytes. pass(circle, level, first, bytes) sends the first host's bytes to the others.
template <class Meet, class Pass>
void gather_circles(const std::vector<Circle> &circles, uint32_t host_count, std::byte *all, uint64_t bytes,
                    Meet &&meet, Pass &&pass) {
  for (size_t level = 0; level < circles.size(); ++level) {
    const Circle &circle = circles[level];
    if (circle.hosts.size() > 1) meet(circle, level, all + circle.hosts.front() * bytes, circle.step * bytes);
  }
  for (size_t level = circles.size(); level-- > 0;)
    if (!circles[level].top && circles[level].hosts.size() > 1) pass(circles[level], level, all, host_count * bytes);
}

struct TeamPlaces {
  std::vector<uint32_t> ranks;               // ranks of the job, in the team's order
  std::vector<std::vector<uint32_t>> hosts;  // team ranks of each host; hosts are in the order of their first ranks
  uint32_t rank = 0;                         // this rank in the team
  uint32_t host = 0;                         // index in `hosts` of this rank's host
};
// Collectives are only messages, which free their buffers when the stream has done them.
inline constexpr CollectiveTraits hybrid_traits{.gathers_are_collective = true,
                                                .records_calls = false,
                                                .step_ends_round = true,
                                                .releases_tickets = false,
                                                .rounds_gradients_before_sending = false,
                                                .receives_slices = false};

class HybridTeam final : public Team {
 public:
  // `near` is the team of this host's ranks; NULL if this rank is the only one. `key` is the same on all ranks of the
  // team and is used only for this team. `circle` is the number of hosts in a circle; 0: a number that suits the team.
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
  // Checks only the ranks of this host. The verdict on other ranks reaches this rank through them.
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
  bool torn_ = false;               // an error ended a call, so hosts no longer agree on the number of exchanges
  std::vector<Circle> circles_;     // circles of hosts; a host is its index in `hosts`
  std::vector<uint32_t> speakers_;  // for each host, the rank of the job that is its speaker
  uint64_t widest_ = 0;             // maximum number of ranks on a host
  uint64_t room_;                   // capacity of hosts_, in hosts
  std::vector<std::byte> hosts_;    // data of each host's ranks, with room for widest_ ranks per host
};

// A rank's membership in a job on several hosts. The ranks of a host use shared memory, and hosts exchange messages.

class HybridWorld final : public World {
 public:
  // `near` is this rank's world on its host, with ranks of the job. hosts[r] is the host of rank r.
  HybridWorld(std::unique_ptr<World> near, std::shared_ptr<Net> net, std::vector<uint32_t> hosts);

  uint32_t rank() const noexcept override { return near_->rank(); }
  uint32_t size() const noexcept override { return static_cast<uint32_t>(hosts_.size()); }
  const std::string &description() const noexcept override { return near_->description(); }
  std::string warnings() const override { return net_->warnings(); }
  uint32_t host_of(uint32_t rank) const override { return hosts_[rank]; }
  bool has_own_cores() const noexcept override { return near_->has_own_cores(); }
  bool has_spare_cores() const noexcept override { return near_->has_spare_cores(); }
  uint64_t message_bytes(std::span<const uint32_t> ranks, bool sums) const override;
  std::unique_ptr<Team> create_team(std::span<const uint32_t> ranks, const std::string &what) override;
  // The leaders of the hosts pass posts on to each other.
  void post(std::span<const std::byte> bytes, std::string_view text, std::optional<uint32_t> to) noexcept override {
    near_->post(bytes, text, to);
  }
  bool read_post(uint32_t rank, std::span<std::byte> bytes, std::span<char> text) const noexcept override {
    return near_->read_post(rank, bytes, text);
  }
  void check() override { near_->check(); }
  void abort(const std::string &reason) noexcept override { near_->abort(reason); }
  void tell_destroyed(const std::string &reason) noexcept override { near_->tell_destroyed(reason); }
  void leave() noexcept override { near_->leave(); }

 private:
  TeamPlaces places_of(std::span<const uint32_t> ranks, const std::string &what) const;

  std::shared_ptr<Net> net_;
  std::unique_ptr<World> near_;
  std::vector<uint32_t> hosts_;
  TeamKeys team_keys_;
};

}  // namespace fsdp::transport
