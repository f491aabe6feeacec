// SPDX-License-Identifier: Apache-2.0
// A rank's membership in a job on one host; the links say how the ranks met.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "membership/liveness/monitor.h"
#include "membership/seat.h"
#include "transport/names.h"
#include "transport/team.h"
#include "transport/team_keys.h"

namespace fsdp::transport {

class ShmWorld final : public World {
 public:
  // With a monitor where ranks are processes.
  ShmWorld(std::shared_ptr<Seat> seat, device::Device &device, std::string description,
           std::unique_ptr<Monitor> monitor = nullptr);
  ~ShmWorld() override;

  uint32_t rank() const noexcept override { return seat_->rank; }
  uint32_t size() const noexcept override { return seat_->control.world_size(); }
  const std::string &description() const noexcept override { return description_; }
  uint32_t host_of(uint32_t) const override { return 0; }
  uint64_t message_bytes(std::span<const uint32_t> ranks, bool) const override {
    return message_staging_bytes(static_cast<uint32_t>(ranks.size()));
  }
  std::unique_ptr<Team> create_team(std::span<const uint32_t> ranks, const std::string &what) override;
  void post(std::span<const std::byte> bytes, std::string_view text, std::optional<uint32_t> to) noexcept override {
    seat_->control.posts().store(rank(), bytes, text, to);
  }
  bool read_post(uint32_t rank, std::span<std::byte> bytes, std::span<char> text) const noexcept override {
    return seat_->control.posts().load(rank, bytes, text);
  }
  void check() override;
  void abort(const std::string &reason) noexcept override { end(Verdict::aborted, reason); }
  void tell_destroyed(const std::string &reason) noexcept override { end(Verdict::destroyed, reason); }
  void leave() noexcept override { seat_->control.set_membership(rank(), Membership::left); }

 private:
  void end(Verdict verdict, const std::string &reason) noexcept;

  std::shared_ptr<Seat> seat_;
  device::Device &device_;
  std::string description_;
  std::unique_ptr<Monitor> monitor_;
  TeamKeys team_keys_;
};

}  // namespace fsdp::transport
