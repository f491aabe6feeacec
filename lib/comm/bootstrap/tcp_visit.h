// SPDX-License-Identifier: Apache-2.0
// The side of every rank but 0 at a TCP rendezvous: finds rank 0, proves the secret, joins, and waits for the roster.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "comm/bootstrap/assembly.h"
#include "comm/bootstrap/frame_stream.h"
#include "comm/bootstrap/meeting_point.h"
#include "comm/bootstrap/message.h"
#include "comm/bootstrap/name_lookup.h"
#include "comm/bootstrap/proof.h"

namespace fsdp::comm {

class TcpVisit {
 public:
  TcpVisit(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter, const MakeCard &make_card);
  Assembly run();

 private:
  using Clock = std::chrono::steady_clock;
  std::vector<Endpoint> places();
  // Empty: try again.
  std::optional<Assembly> visit(const Endpoint &place);
  bool connect(const Endpoint &place);
  void join();
  void say(const message::Message &message);
  std::optional<Assembly> await_start();
  void report(const Error &error) noexcept;
  bool take(const message::Entries &entries, Assembly &assembly);
  void obey(const message::Refusal &refusal);
  [[noreturn]] void give_up() const;
  Limit limit(Clock::duration most) const { return {std::min(deadline_, Clock::now() + most), waiter_}; }

  const WorldOptions &options_;
  const MeetingPoint &point_;
  const Waiter &waiter_;
  const MakeCard &make_card_;
  Clock::time_point deadline_;
  NameLookup names_;
  std::string last_problem_;
  bool refused_ = false;  // a proof has failed
  FrameStream stream_;
  uint32_t node_count_ = 0;            // of the entries so far
  std::optional<message::Card> card_;  // once this rank has reached the rendezvous
};

}  // namespace fsdp::comm
