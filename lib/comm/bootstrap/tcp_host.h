// SPDX-License-Identifier: Apache-2.0
// Rank 0's side of a TCP rendezvous: listens at one interface, lets in who proves the secret, and when all have joined,
// tells everybody who is where. The listener lives no longer.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/bootstrap/assembly.h"
#include "comm/bootstrap/meeting_point.h"
#include "comm/bootstrap/message.h"
#include "comm/bootstrap/proof.h"
#include "comm/bootstrap/stream.h"

namespace fsdp::comm {

class TcpHost {
 public:
  TcpHost(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter, const MakeCard &make_card);
  Assembly run();

 private:
  using Clock = std::chrono::steady_clock;
  // Who has not joined yet.
  struct Guest {
    Stream stream;
    Handshake proof;
    Clock::time_point since;
    bool proven() const { return proof.state() == Handshake::State::proven; }
  };
  struct Seat {
    Stream stream;
    std::string host_id, host;
    std::vector<std::byte> card;
    bool taken = false;
  };

  void listen();
  Fd listen_somewhere();
  void look_around();
  bool has_room();
  void accept_guests();
  bool hear(Guest &guest);  // false: its connection is of no more use
  void join(Guest &guest, message::Join &join);
  void refuse(Guest &guest, fsdp_status status, const std::string &text);
  void check_joined();
  void check_timeout();
  std::vector<uint32_t> missing() const;
  Roster make_roster();
  void send_roster(const Assembly &assembly);
  [[noreturn]] void cancel(const Error &error);

  const WorldOptions &options_;
  const MeetingPoint &point_;
  const Waiter &waiter_;
  const MakeCard &make_card_;
  Clock::time_point deadline_;
  std::string label_;
  Fd listener_;
  Endpoint at_;
  std::unique_ptr<Notice> notice_;
  std::vector<Guest> guests_;
  std::vector<Seat> seats_;
  uint32_t joined_ = 1;
  std::string accept_problem_;
};

}  // namespace fsdp::comm
