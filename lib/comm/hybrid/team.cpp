// SPDX-License-Identifier: Apache-2.0
#include "comm/hybrid/team.h"

#include <algorithm>
#include <cstring>

#include "comm/team_keys.h"
#include "comm/together.h"

namespace fsdp::comm {
namespace {

[[noreturn]] void refuse_over_hosts(const std::string &what, const char *thing) {
  fail(FSDP_UNSUPPORTED, "{}: {} between ranks of several hosts; they share no memory", what, thing);
}

}  // namespace

HybridTeam::HybridTeam(std::shared_ptr<Net> net, TeamPlaces places, std::unique_ptr<Team> near, uint64_t key)
    : net_(std::move(net)), places_(std::move(places)), near_(std::move(near)), key_(key) {
  for (const auto &host : places_.hosts) {
    speakers_.push_back(places_.ranks[host.front()]);
    widest_ = std::max<uint64_t>(widest_, host.size());
  }
}

std::unique_ptr<Arena> HybridTeam::create_arena(uint64_t, std::span<const Range>, const std::string &what) {
  refuse_over_hosts(what, "an arena");
}
std::unique_ptr<Gate> HybridTeam::create_gate(const std::string &what) { refuse_over_hosts(what, "a gate"); }
std::unique_ptr<Communicator> HybridTeam::create_communicator(const std::string &what, uint32_t) {
  refuse_over_hosts(what, "a communicator over shared memory");
}

// What this host's ranks say, in the team's order.
std::span<const std::byte> HybridTeam::gather_host(const void *mine, uint64_t bytes, const char *what) {
  host_.resize(std::max(host_.size(), widest_ * bytes));
  if (near_)
    near_->exchange_fixed(mine, bytes, host_.data(), what);
  else
    std::memcpy(host_.data(), mine, bytes);
  return {host_.data(), widest_ * bytes};
}

// The speaker has what all hosts say: every rank of this host gets it, each rank's part at its place.
void HybridTeam::spread(uint64_t bytes, void *all, const char *what) {
  const uint64_t stride = widest_ * bytes;
  std::span<const std::byte> told(hosts_.data(), speaks() ? stride * speakers_.size() : 0);
  std::vector<std::vector<std::byte>> heard;
  if (near_) {
    heard = near_->exchange(told, what);
    told = heard.front();  // the speaker is the first of its host
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

void HybridTeam::exchange_fixed(const void *mine, uint64_t bytes, void *all, const char *what) {
  const auto said = gather_host(mine, bytes, what);
  if (speaks()) {
    hosts_.resize(std::max<size_t>(hosts_.size(), said.size() * speakers_.size()));
    net_->exchange(speakers_, key_, said.data(), said.size(), hosts_.data(), what);
  }
  spread(bytes, all, what);
}

std::vector<std::vector<std::byte>> HybridTeam::exchange(std::span<const std::byte> mine, const std::string &what) {
  const uint64_t length = mine.size();
  std::vector<uint64_t> lengths(size());
  exchange_fixed(&length, sizeof length, lengths.data(), what.c_str());
  const uint64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::vector<std::byte>> result(size());
  if (longest == 0) return result;
  std::vector<std::byte> padded(mine.begin(), mine.end()), all(longest * size());
  padded.resize(longest);
  exchange_fixed(padded.data(), longest, all.data(), what.c_str());
  for (uint32_t r = 0; r < size(); ++r)
    result[r].assign(all.begin() + static_cast<ptrdiff_t>(r * longest),
                     all.begin() + static_cast<ptrdiff_t>(r * longest + lengths[r]));
  return result;
}

std::unique_ptr<MessageCommunicator> HybridTeam::create_message_communicator(const std::string &what, bool sums) {
  std::unique_ptr<MessageCommunicator> communicator;
  const uint64_t key = TeamKeys::mix(key_, ++communicators_);
  const Outcome mine = Outcome::of([&] { communicator = net_->create_communicator(places_.ranks, key, what, sums); });
  std::vector<Outcome> all(size());
  exchange_fixed(&mine, sizeof mine, all.data(), what.c_str());
  check_outcomes(*this, all);
  return communicator;
}

}  // namespace fsdp::comm
