// SPDX-License-Identifier: Apache-2.0
// A rank's membership in a job on several hosts: shared memory among the ranks of a host, messages between hosts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/hierarchy/team.h"
#include "transport/net.h"
#include "transport/team.h"
#include "transport/team_keys.h"

namespace fsdp::transport {

class HybridWorld final : public World {
 public:
  // near: this rank's world on its host, by ranks of the job. hosts[r]: rank r's.
  HybridWorld(std::unique_ptr<World> near, std::shared_ptr<Net> net, std::vector<uint32_t> hosts);

  uint32_t rank() const noexcept override { return near_->rank(); }
  uint32_t size() const noexcept override { return static_cast<uint32_t>(hosts_.size()); }
  const std::string &description() const noexcept override { return near_->description(); }
  std::string warnings() const override { return net_->warnings(); }
  uint32_t host_of(uint32_t rank) const override { return hosts_[rank]; }
  uint64_t message_bytes(std::span<const uint32_t> ranks, bool sums) const override;
  std::unique_ptr<Team> create_team(std::span<const uint32_t> ranks, const std::string &what) override;
  // The leaders of the hosts bring them to each other.
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
