// SPDX-License-Identifier: Apache-2.0
// Where other leaders come to this one: takes connections, and tells of those that have proven the job secret and said
// which node they are. Never waits.
#pragma once

#include <poll.h>

#include <chrono>
#include <string>
#include <vector>

#include "comm/bootstrap/accept_pause.h"
#include "comm/bootstrap/frame_stream.h"
#include "comm/bootstrap/proof.h"
#include "comm/nodes/greeting.h"

namespace fsdp::comm {

class Door {
 public:
  using Clock = std::chrono::steady_clock;
  struct Newcomer {
    nodes::Hello hello;
    FrameStream stream;
  };

  // Both outlive it.
  Door(const NodePlan &plan, const Fd &listener) : plan_(plan), listener_(listener), label_(link_label(plan)) {}

  void add_polls(std::vector<pollfd> &polls, bool takes) const;
  // takes: new connections too; else these wait in the kernel.
  std::vector<Newcomer> look(bool takes);
  // Why connections could not be taken; empty: they could.
  std::string problem() const { return pause_.problem(); }

 private:
  struct Stranger {
    Fd socket;
    Handshake handshake;
    Clock::time_point deadline;
    FrameStream stream;  // once proven
    bool gone = false;
  };

  void accept();
  bool has_room();
  void hear(Stranger &stranger, std::vector<Newcomer> &newcomers);

  const NodePlan &plan_;
  const Fd &listener_;
  std::string label_;
  std::vector<Stranger> strangers_;
  AcceptPause pause_;
};

}  // namespace fsdp::comm
