// SPDX-License-Identifier: Apache-2.0
// The side of the lowest rank of a host: listens, lets in who proves the secret, and starts the job when all have
// joined.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "membership/join/process_links.h"
#include "membership/join/rendezvous.h"
#include "membership/wire/endpoint.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {

class Host {
 public:
  // ranks: those of this host, in order. Of a job on one host: all.
  Host(const WorldOptions &options, std::span<const uint32_t> ranks, const Waiter &waiter);
  Rendezvous run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Guest {
    Fd socket;
    enum { strange, proven } state = strange;
    Nonce nonce{};
    Clock::time_point deadline;  // of who has not joined
  };
  struct Seat {
    Fd connection;
    PeerDoors doors;
    bool expected = false, taken = false;
  };

  void listen();
  void look_around();
  void accept_guests();
  void hear(Guest &guest);
  void hear_giving_up(const wire::Refusal &word);
  bool check_answer(Guest &guest, const Packet &packet);
  void join(Guest &guest, Packet &packet);
  void check_joined();
  [[noreturn]] void lose(uint32_t rank) const;
  void start_all();
  void send_all(uint32_t to, const void *message, size_t bytes, std::span<const int> files);
  [[noreturn]] void cancel(const Error &error);
  void say_farewell() noexcept;
  void check_limits();
  std::vector<uint32_t> missing() const;

  const WorldOptions &options_;
  const std::span<const uint32_t> ranks_;
  const Waiter &waiter_;
  Clock::time_point deadline_;
  Fd listener_;
  AcceptPause pause_;
  std::vector<Guest> guests_;  // who has not joined yet
  std::optional<Error> end_;   // what everybody is told who comes now
  size_t told_ = 0;            // of those who had not joined
  std::vector<Seat> seats_;    // by rank of the job
  uint32_t joined_ = 1;
  Doors doors_;
  Fd control_;
};

}  // namespace fsdp::membership
