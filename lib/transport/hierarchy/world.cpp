// SPDX-License-Identifier: Apache-2.0
#include "transport/hierarchy/world.h"

#include <algorithm>

namespace fsdp::transport {

HybridWorld::HybridWorld(std::unique_ptr<World> near, std::shared_ptr<Net> net, std::vector<uint32_t> hosts)
    : net_(std::move(net)), near_(std::move(near)), hosts_(std::move(hosts)) {}

TeamPlaces HybridWorld::places_of(std::span<const uint32_t> ranks, const std::string &what) const {
  TeamPlaces places;
  places.ranks.assign(ranks.begin(), ranks.end());
  constexpr uint32_t unknown = UINT32_MAX;
  std::vector<uint32_t> place_of(*std::ranges::max_element(hosts_) + 1, unknown);  // of each host, in the team
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
