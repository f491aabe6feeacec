// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "membership/liveness/monitor.h"
#include "membership/seat.h"
#include "transport/names.h"
#include "transport/shm/board.h"
#include "transport/shm/relay.h"
#include "transport/team.h"

namespace fsdp::transport {

inline constexpr CollectiveTraits shm_traits{.gathers_are_collective = false,
                                             .records_calls = false,
                                             .step_ends_round = true,
                                             .releases_tickets = true,
                                             .rounds_gradients_before_sending = false,
                                             .receives_slices = false};

class ShmTeam final : public Team {
 public:
  // `key` is the same on all ranks of the team, and no other team has it. Waits for the ranks if the links require it.
  ShmTeam(std::shared_ptr<Seat> seat, device::Device &device, std::vector<uint32_t> ranks, uint64_t key,
          const std::string &what);

  const CollectiveTraits &traits() const noexcept override { return shm_traits; }
  bool spans_hosts() const noexcept override { return false; }
  uint32_t rank() const noexcept override { return rank_; }
  uint32_t size() const noexcept override { return static_cast<uint32_t>(ranks_.size()); }
  uint32_t world_rank(uint32_t r) const noexcept override { return ranks_[r]; }

  std::unique_ptr<Arena> create_arena(uint64_t bytes, std::span<const Range> writable, const std::string &what,
                                      View view) override;
  std::unique_ptr<Versions> create_versions(const std::string &what) override;
  std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape) override;
  Ballot fold(const Ballot &mine, const char *what) override { return board_->fold(mine, what); }
  void all_gather(const void *mine, uint64_t bytes, void *all, const char *what) override {
    board_->all_gather(mine, bytes, all, what);
  }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine, const std::string &what) override {
    return board_->all_gather(mine, what);
  }
  uint64_t meetings() const noexcept override { return board_->meetings(); }
  void look(const std::string &what, bool waited) override { seat_->watch.look_at(ranks_, what, waited); }

 private:
  void meet(const std::string &what);
  // Makes memory of the team in three steps, each of which succeeds on all ranks or fails on all. First every rank
  // calls `prepare`, and the first rank creates the file. Then the file is passed on. Then every rank calls `use` with
  // the file.
  template <class Prepare, class Use>
  void share_memory(uint64_t bytes, const std::string &what, Prepare &&prepare, Use &&use);
  void compare(const std::optional<Error> &mine, uint64_t bytes, const std::string &what);
  void pass(Fd &file, uint64_t bytes, const std::string &what);
  Mapping share_words(uint64_t bytes, const std::string &what);
  std::unique_ptr<Relay> create_relay(const std::string &what);

  std::shared_ptr<Seat> seat_;
  device::Device &device_;
  std::vector<uint32_t> ranks_;
  uint32_t rank_ = 0;
  uint64_t key_;
  uint64_t parcels_ = 0;
  std::unique_ptr<Board> board_;
};

// A rank's membership in a job on one host. The links depend on how the ranks met.

class ShmWorld final : public World {
 public:
  // `monitor` is set if ranks are processes.
  ShmWorld(std::shared_ptr<Seat> seat, device::Device &device, std::string description,
           std::unique_ptr<Monitor> monitor = nullptr);
  ~ShmWorld() override;

  uint32_t rank() const noexcept override { return seat_->rank; }
  uint32_t size() const noexcept override { return seat_->control.world_size(); }
  const std::string &description() const noexcept override { return description_; }
  uint32_t host_of(uint32_t) const override { return 0; }
  bool has_own_cores() const noexcept override { return seat_->control.has_own_cores(); }
  bool has_spare_cores() const noexcept override { return seat_->control.has_spare_cores(); }
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
  void abort(const std::string &reason) noexcept override { end(FailureKind::aborted, reason); }
  void tell_destroyed(const std::string &reason) noexcept override { end(FailureKind::destroyed, reason); }
  void leave() noexcept override { seat_->control.set_membership(rank(), Membership::left); }

 private:
  void end(FailureKind kind, const std::string &reason) noexcept;

  std::shared_ptr<Seat> seat_;
  device::Device &device_;
  std::string description_;
  std::unique_ptr<Monitor> monitor_;
  TeamKeys team_keys_;
};

}  // namespace fsdp::transport
