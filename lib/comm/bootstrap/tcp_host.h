// SPDX-License-Identifier: Apache-2.0
// Rank 0's side of a TCP rendezvous: lets in who proves the secret, and when all have joined, tells everybody who is
// where. The listener lives no longer. If the job cannot form, whoever has joined or is about to is told why.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/bootstrap/assembly.h"
#include "comm/bootstrap/frame_stream.h"
#include "comm/bootstrap/message.h"
#include "comm/bootstrap/proof.h"
#include "comm/bootstrap/tcp_door.h"

namespace fsdp::comm {

class TcpHost {
 public:
  TcpHost(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter, const MakeCard &make_card);
  Assembly run();

 private:
  using Clock = std::chrono::steady_clock;
  using Party = HostVigil::Party;
  // Who has not joined yet.
  struct Guest {
    FrameStream stream;
    Handshake proof;
    Clock::time_point since;
    bool welcomed = false;    // has been seen to be proven
    bool introduced = false;  // has said which library it has
    bool proven() const { return proof.state() == Handshake::State::proven; }
  };

  void gather();
  void look_around();
  bool has_room();
  bool drop_stranger();
  void accept_guests();
  bool hear(Guest &guest);  // false: its connection is of no more use
  bool greet(Guest &guest, const message::Hello &hello);
  void join(Guest &guest, message::Join &join);
  void note(const std::string &who, const std::string &why, bool proven);
  void turn_away(Guest &guest, fsdp_status status, const std::string &text);
  void refuse(Guest &guest, fsdp_status status, const std::string &text, int32_t rank = -1);
  void check_limits();
  void say_farewell(const Error &error) noexcept;
  void dismiss_guests();
  std::vector<uint32_t> missing() const;
  bool complete() const;
  Roster make_roster();
  void send_roster(const Assembly &assembly);

  const WorldOptions &options_;
  const MeetingPoint &point_;
  const Waiter &waiter_;
  const MakeCard &make_card_;
  Clock::time_point deadline_;
  std::string label_;
  NameLookup names_;
  std::unique_ptr<TcpDoor> door_;
  std::unique_ptr<HostVigil> vigil_;
  std::vector<Guest> guests_;
  std::optional<Error> end_;  // what everybody is told who comes now
  RankSet told_;              // of those who had not joined
  size_t told_count_ = 0;
  bool outdated_ = false;                    // a rank of a later attempt has come
  uint32_t notes_ = 0, stranger_notes_ = 0;  // in the log
  std::string stranger_remark_;              // what was wrong with one, for who misses ranks
};

}  // namespace fsdp::comm
