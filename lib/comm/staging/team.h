// SPDX-License-Identifier: Apache-2.0
// The ranks of a host team over memory of their devices, whose bytes go through pinned memory of the host. Small
// exchanges stay with the host team. Works wherever that team's communicators do: between hosts there are
// MessageCommunicators only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/staging/sizes.h"

namespace fsdp::comm::staging {

// What each rank allocates for one communicator, pinned or of the device, beside what the host's own ones do.
uint64_t communicator_bytes(const Sizes &sizes = {}) noexcept;
uint64_t messages_bytes(const Sizes &sizes = {}) noexcept;

class StagedTeam final : public Team {
 public:
  // sizes: the same on all ranks.
  StagedTeam(std::shared_ptr<Team> host, device::Device &device, const Sizes &sizes = {})
      : host_(std::move(host)), device_(device), sizes_(sizes) {}

  bool spans_hosts() const noexcept override { return host_->spans_hosts(); }
  uint32_t rank() const noexcept override { return host_->rank(); }
  uint32_t size() const noexcept override { return host_->size(); }
  uint32_t world_rank(uint32_t r) const noexcept override { return host_->world_rank(r); }

  // Of one rank only: no other could read it.
  std::unique_ptr<Arena> create_arena(uint64_t bytes, std::span<const Range> writable,
                                      const std::string &what) override;
  std::unique_ptr<Arena> create_parts(uint64_t part_bytes, const std::string &what) override;
  std::unique_ptr<Gate> create_gate(const std::string &what) override;
  std::unique_ptr<Communicator> create_communicator(const std::string &what, uint32_t reduction_block) override;
  std::unique_ptr<MessageCommunicator> create_message_communicator(const std::string &what, bool sums) override;
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> mine, const std::string &what) override {
    return host_->exchange(mine, what);
  }
  void exchange_fixed(const void *mine, uint64_t bytes, void *all, const char *what) override {
    host_->exchange_fixed(mine, bytes, all, what);
  }

 private:
  std::shared_ptr<Team> host_;
  device::Device &device_;
  Sizes sizes_;
};

}  // namespace fsdp::comm::staging
