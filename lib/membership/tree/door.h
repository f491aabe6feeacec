// SPDX-License-Identifier: Apache-2.0
// Where other leaders come to this one: takes connections, and tells of those that have proven the job secret and said
// which node they are. Never waits.
#pragma once

#include <poll.h>

#include <chrono>
#include <string>
#include <vector>

#include "membership/tree/message.h"
#include "membership/wire/endpoint.h"
#include "membership/wire/frame_stream.h"
#include "membership/wire/proof.h"

namespace fsdp::membership {

class Door {
 public:
  using Clock = std::chrono::steady_clock;
  struct Newcomer {
    tree::Hello hello;
    FrameStream stream;
  };

  // However many strangers come, each has this time to prove the secret: a round trip to another continent. Only where
  // one address has more than half of all places it may lose them sooner, to itself and to others.
  static constexpr auto least_time = std::chrono::milliseconds(250);

  // Both outlive it.
  Door(const NodePlan &plan, const Fd &listener);

  // Where many strangers wait, these wake nobody: the caller looks again after its usual time.
  void add_polls(std::vector<pollfd> &polls, bool takes) const;
  // takes: new connections too; else these wait in the kernel.
  std::vector<Newcomer> look(bool takes);
  // Why connections could not be taken; empty: they could.
  std::string problem() const { return pause_.problem(); }

 private:
  struct Stranger {
    Fd socket;
    std::string from;  // its address
    Handshake handshake;
    Clock::time_point deadline;
    FrameStream stream;  // once proven
    bool gone = false;
  };

  void accept(std::vector<Newcomer> &newcomers);
  bool has_room();
  std::vector<Stranger>::iterator find_oldest_of_most();
  bool crowded() const;
  void hear(Stranger &stranger, std::vector<Newcomer> &newcomers);

  const NodePlan &plan_;
  const Fd &listener_;
  std::string label_;
  const size_t most_strangers_;
  std::vector<Stranger> strangers_;  // the oldest first
  AcceptPause pause_;
};

}  // namespace fsdp::membership
