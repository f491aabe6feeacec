// SPDX-License-Identifier: Apache-2.0

#include "transport/hierarchy/team.h"

#include <algorithm>
#include <cstring>

#include "transport/exchange.h"
#include "transport/team.h"

namespace fsdp::transport {

namespace {

[[noreturn]] void refuse_over_hosts(const std::string &what, const char *thing) {
  fail(FSDP_UNSUPPORTED, "{}: {} between ranks of several hosts; they share no memory", what, thing);
}

uint32_t circle_for(const TeamPlaces &places, uint32_t asked) {
  return asked ? asked : circle_size_of(static_cast<uint32_t>(places.hosts.size()));
}

}  // namespace

HybridTeam::HybridTeam(std::shared_ptr<Net> net, TeamPlaces places, std::unique_ptr<Team> near, uint64_t key,
                       uint32_t circle)
    : net_(std::move(net)),
      places_(std::move(places)),
      near_(std::move(near)),
      key_(key),
      circles_(circles_of(places_.host, host_count(), circle_for(places_, circle))),
      room_(circle_room(host_count(), circle_for(places_, circle))) {
  for (const auto &host : places_.hosts) {
    speakers_.push_back(places_.ranks[host.front()]);
    widest_ = std::max<uint64_t>(widest_, host.size());
  }
}

// When a call ends by an error, only some hosts of the circles may have completed it. The next messages of these hosts
// must not count as messages of this call.
class HybridTeam::Unbroken {
 public:
  Unbroken(HybridTeam &team, const char *what) : team_(team) {
    if (team.torn_) fail(FSDP_INVALID_STATE, "{}: an earlier exchange of this team did not complete", what);
    team.torn_ = true;
    ++team.meetings_;
  }
  void done() noexcept { team_.torn_ = false; }

 private:
  HybridTeam &team_;
};

std::unique_ptr<Arena> HybridTeam::create_arena(uint64_t, std::span<const Range>, const std::string &what, View) {
  refuse_over_hosts(what, "an arena");
}

std::vector<uint32_t> HybridTeam::speakers_of(const Circle &circle) const {
  std::vector<uint32_t> speakers;
  for (const uint32_t host : circle.hosts) speakers.push_back(speakers_[host]);
  return speakers;
}

// A circle of all hosts uses the exchanges of the whole team.
uint64_t HybridTeam::key_of(const Circle &circle, size_t level) const {
  if (circle.hosts.size() == speakers_.size()) return key_;
  return TeamKeys::mix(key_, uint64_t{1} << 40 | uint64_t{level} << 32 | circle.hosts.front());
}

std::vector<Ballot> HybridTeam::meet(const Circle &circle, size_t level, const Ballot &mine, const char *what) {
  if (circle.hosts.size() == 1) return {mine};
  std::vector<Ballot> told(circle.hosts.size());
  net_->exchange(speakers_of(circle), key_of(circle, level), &mine, sizeof mine, told.data(), what);
  return told;
}

// First the ranks of this host fold their ballots, so that each knows the host's ballot. Then one of them exchanges it
// with the other hosts.
Ballot HybridTeam::fold(const Ballot &mine, const char *what) {
  Unbroken unbroken(*this, what);
  Ballot folded = near_ ? near_->fold(mine, what) : mine;
  if (speaks())
    folded = fold_circles(
        circles_, folded,
        [&](const Circle &circle, size_t level, const Ballot &ballot) { return meet(circle, level, ballot, what); },
        [&](const Circle &circle, size_t level, Ballot ballot) {
          net_->broadcast(speakers_of(circle), key_of(circle, level), &ballot, sizeof ballot, what);
          return ballot;
        });
  if (near_) {
    std::vector<Ballot> told(near_->size());
    near_->all_gather(&folded, sizeof folded, told.data(), what);
    folded = told.front();  // the speaker is the first rank of its host
  }
  unbroken.done();
  return folded;
}

// Gathers the bytes of this host's ranks, in the team's order, at the host's place in hosts_.
void HybridTeam::gather_host(const void *mine, uint64_t bytes, const char *what) {
  hosts_.resize(std::max(hosts_.size(), room_ * widest_ * bytes));
  if (near_)
    near_->all_gather(mine, bytes, place_of(places_.host, bytes), what);
  else
    std::memcpy(place_of(places_.host, bytes), mine, bytes);
}

// Called by the speaker.
void HybridTeam::gather_hosts(uint64_t bytes, const char *what) {
  gather_circles(
      circles_, host_count(), hosts_.data(), widest_ * bytes,
      [&](const Circle &circle, size_t level, std::byte *first, uint64_t each) {
        const auto me = std::ranges::find(circle.hosts, places_.host) - circle.hosts.begin();
        const std::byte *own = first + static_cast<uint64_t>(me) * each;
        net_->exchange(speakers_of(circle), key_of(circle, level), own, each, first, what);
      },
      [&](const Circle &circle, size_t level, std::byte *first, uint64_t all) {
        net_->broadcast(speakers_of(circle), key_of(circle, level), first, all, what);
      });
}

// The speaker has the bytes of all hosts. Every rank of this host gets them, with each rank's part at its place.
void HybridTeam::spread(uint64_t bytes, void *all, const char *what) {
  const uint64_t stride = widest_ * bytes;
  std::span<const std::byte> told(hosts_.data(), speaks() ? stride * speakers_.size() : 0);
  std::vector<std::vector<std::byte>> heard;
  if (near_) {
    heard = near_->all_gather(told, what);
    told = heard.front();  // the speaker is the first rank of its host
  }
  if (told.size() != stride * speakers_.size())
    fail_rank(FSDP_INTERNAL, static_cast<int32_t>(speakers_[places_.host]),
              "{}: rank {} brought {} bytes of all hosts, {} are expected", what, speakers_[places_.host], told.size(),
              stride * speakers_.size());
  for (size_t h = 0; h < places_.hosts.size(); ++h)
    for (size_t i = 0; i < places_.hosts[h].size(); ++i)
      std::memcpy(static_cast<std::byte *>(all) + places_.hosts[h][i] * bytes, told.data() + h * stride + i * bytes,
                  bytes);
}

void HybridTeam::all_gather(const void *mine, uint64_t bytes, void *all, const char *what) {
  Unbroken unbroken(*this, what);
  gather_host(mine, bytes, what);
  if (speaks()) gather_hosts(bytes, what);
  spread(bytes, all, what);
  unbroken.done();
}

std::vector<std::vector<std::byte>> HybridTeam::all_gather(std::span<const std::byte> mine, const std::string &what) {
  const uint64_t length = mine.size();
  std::vector<uint64_t> lengths(size());
  all_gather(&length, sizeof length, lengths.data(), what.c_str());
  const uint64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::vector<std::byte>> result(size());
  if (longest == 0) return result;
  std::vector<std::byte> padded(mine.begin(), mine.end()), all(longest * size());
  padded.resize(longest);
  all_gather(padded.data(), longest, all.data(), what.c_str());
  for (uint32_t r = 0; r < size(); ++r)
    result[r].assign(all.begin() + static_cast<ptrdiff_t>(r * longest),
                     all.begin() + static_cast<ptrdiff_t>(r * longest + lengths[r]));
  return result;
}

std::unique_ptr<Collectives> HybridTeam::create_collectives(const std::string &what, const Shape &shape) {
  if (shape.arenas) refuse_over_hosts(what, "a communicator over shared memory");
  std::unique_ptr<Collectives> made;
  const uint64_t key = TeamKeys::mix(key_, ++sequences_);
  attempt_together(*this, what, [&] { made = net_->create_collectives(places_.ranks, key, what, shape.sums); });
  return made;
}

HybridWorld::HybridWorld(std::unique_ptr<World> near, std::shared_ptr<Net> net, std::vector<uint32_t> hosts)
    : net_(std::move(net)), near_(std::move(near)), hosts_(std::move(hosts)) {}

TeamPlaces HybridWorld::places_of(std::span<const uint32_t> ranks, const std::string &what) const {
  TeamPlaces places;
  places.ranks.assign(ranks.begin(), ranks.end());
  constexpr uint32_t unknown = UINT32_MAX;
  std::vector<uint32_t> place_of(*std::ranges::max_element(hosts_) + 1, unknown);  // each host's place in the team
  std::vector<bool> named(size());
  bool here = false;
  for (uint32_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r] >= size()) fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is outside [0, {})", what, ranks[r], size());
    if (named[ranks[r]]) fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is named twice", what, ranks[r]);
    named[ranks[r]] = true;
    uint32_t &host = place_of[hosts_[ranks[r]]];
    if (host == unknown) {
      host = static_cast<uint32_t>(places.hosts.size());
      places.hosts.emplace_back();
    }
    places.hosts[host].push_back(r);
    if (ranks[r] != rank()) continue;
    here = true;
    places.rank = r;
    places.host = host;
  }
  if (!here) fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is not among the ranks of the team", what, rank());
  return places;
}

uint64_t HybridWorld::message_bytes(std::span<const uint32_t> ranks, bool sums) const {
  const auto count = static_cast<uint32_t>(ranks.size());
  const auto here = [&](uint32_t rank) { return hosts_[rank] == hosts_[ranks[0]]; };
  if (std::all_of(ranks.begin(), ranks.end(), here)) return near_->message_bytes(ranks, sums);
  return sums ? net_->scratch_bytes(count) : 0;
}

std::unique_ptr<Team> HybridWorld::create_team(std::span<const uint32_t> ranks, const std::string &what) {
  TeamPlaces places = places_of(ranks, what);
  if (places.hosts.size() == 1) return near_->create_team(ranks, what);
  std::vector<uint32_t> neighbours;
  for (const uint32_t r : places.hosts[places.host]) neighbours.push_back(places.ranks[r]);
  std::unique_ptr<Team> near;
  if (neighbours.size() > 1) near = near_->create_team(neighbours, what);
  const uint64_t key = team_keys_.next(places.ranks);
  return std::make_unique<HybridTeam>(net_, std::move(places), std::move(near), key);
}

}  // namespace fsdp::transport
