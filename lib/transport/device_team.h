// SPDX-License-Identifier: Apache-2.0
// The ranks of a host team over memory of their devices: the common part of such teams, whatever transport carries the
// bytes. Small exchanges and liveness stay with the host team.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/team.h"

namespace fsdp::transport {

// The arena of a device whose memory other ranks do not read. Only this rank's part exists; the addresses of the
// others' parts are not valid.

class PartArena : public Arena {
 public:
  PartArena(device::Device &device, uint64_t part_bytes, uint32_t rank, uint32_t size, std::string what);

  const std::byte *data() const noexcept override { return base_; }
  uint64_t size_bytes() const noexcept override { return size_bytes_; }
  std::byte *writable() const noexcept override { return base_; }
  void protect(uint64_t offset, uint64_t bytes, bool readable) override;
  void protect_own(uint64_t offset, uint64_t bytes, Access access) override;
  bool protects() const noexcept override { return false; }
  void restore(uint64_t offset, uint64_t bytes) override;
  // The memory of this rank's part.
  device::Memory &own() const noexcept { return *memory_; }

 private:
  std::string what_;
  uint64_t size_bytes_;
  std::unique_ptr<device::Memory> memory_;
  // The address at which rank 0's part would be if the parts of all ranks lay one after the other. So code that
  // computes base + rank * part_bytes needs no special case for a device. Only this rank's own part is ever accessed.
  std::byte *base_;
};

// Work in a stream of a device waits there for peers, and cannot be queried or skipped.
inline constexpr CollectiveTraits device_traits{.gathers_are_collective = true,
                                                .records_calls = true,
                                                .step_ends_round = false,
                                                .releases_tickets = false,
                                                .rounds_gradients_before_sending = true,
                                                .receives_slices = false};

class DeviceTeam : public Team {
 public:
  DeviceTeam(std::shared_ptr<Team> host, device::Device &device) : host_(std::move(host)), device_(device) {}

  const CollectiveTraits &traits() const noexcept override { return device_traits; }
  bool spans_hosts() const noexcept override { return host_->spans_hosts(); }
  uint32_t rank() const noexcept override { return host_->rank(); }
  uint32_t size() const noexcept override { return host_->size(); }
  uint32_t world_rank(uint32_t r) const noexcept override { return host_->world_rank(r); }

  // Only for a team of one rank: no other rank could read the arena.
  std::unique_ptr<Arena> create_arena(uint64_t bytes, std::span<const Range> writable, const std::string &what,
                                      View view) override;
  std::unique_ptr<Arena> create_parts(uint64_t part_bytes, const std::string &what, View view) override;
  Ballot fold(const Ballot &mine, const char *what) override { return host_->fold(mine, what); }
  void all_gather(const void *mine, uint64_t bytes, void *all, const char *what) override {
    host_->all_gather(mine, bytes, all, what);
  }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine, const std::string &what) override {
    return host_->all_gather(mine, what);
  }
  uint64_t meetings() const noexcept override { return host_->meetings(); }
  void look(const std::string &what, bool waited) override { host_->look(what, waited); }
  std::vector<Note> notes() const override { return notes_; }
  void add_note(Note note) { notes_.push_back(std::move(note)); }
  DeviceTransport transport() const noexcept override { return transport_; }
  void set_transport(DeviceTransport transport) noexcept { transport_ = transport; }

 protected:
  std::shared_ptr<Team> host_;
  device::Device &device_;

 private:
  std::vector<Note> notes_;
  DeviceTransport transport_ = DeviceTransport::staging;
};

}  // namespace fsdp::transport
