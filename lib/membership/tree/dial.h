// SPDX-License-Identifier: Apache-2.0
// Connections between leaders, from both sides: both ends prove the job secret, then the leader that has connected
// sends the number of its node, and the other leader answers.
#pragma once

#include <poll.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/failure.h"
#include "base/fd.h"
#include "membership/tree/message.h"
#include "membership/tree/plan.h"
#include "membership/wire/acceptor.h"
#include "membership/wire/frame_stream.h"
#include "membership/wire/handshake.h"

namespace fsdp::membership {

// The sockets on which a leader listens for the leaders of other nodes. Every rank opens a listener before the ranks
// meet, because it is unknown until then which ranks will lead. Ranks that do not lead close it.

struct LeaderListener {
  Fd stream;            // TCP, listening
  Fd datagrams;         // UDP at the same port, for heartbeats
  std::string address;  // address for the other leaders
};

// Listens only at the interface of this numeric address.
LeaderListener open_leader_listener(const std::string &interface_address);

// The connecting side. Never waits.
class Dial {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State {
    trying,
    answered,
    ended,   // the connection ended, or no answer came: another try may succeed
    refused  // the other end is no leader of this job, or no process listens there
  };

  // The plan must outlive this object.
  Dial(const NodePlan &plan, uint32_t to, tree::Bond bond);

  uint32_t to() const noexcept { return to_; }
  State advance();
  State state() const noexcept { return state_; }
  // Says why the dial has failed or, while it tries, for what it waits.
  const std::string &problem() const noexcept { return problem_; }
  // True if no process listens at the address of that node's leader, which means that the leader has ended.
  bool nobody_listens() const noexcept { return deserted_; }
  pollfd poll() const;
  // The connection, once the dial has been answered.
  FrameStream take() { return std::move(stream_); }

 private:
  void connect();
  void prove();
  void hear_answer();
  void fail(State state, std::string problem);

  const NodePlan &plan_;
  uint32_t to_;
  tree::Bond bond_;
  Endpoint end_;
  Clock::time_point since_;
  State state_ = State::trying;
  bool connecting_ = true, deserted_ = false;
  std::string problem_ = "it has not answered";
  Fd socket_;
  std::optional<Handshake> handshake_;
  FrameStream stream_;  // used once both ends have proven the secret
};

// The listening side: returns the connections of leaders that have proven the job secret and sent the number of their
// node. Never waits.
class Newcomers {
 public:
  using Clock = std::chrono::steady_clock;
  struct Newcomer {
    tree::LinkHello hello;
    FrameStream stream;
  };

  // Both arguments must outlive this object.
  Newcomers(const NodePlan &plan, const Fd &listener);

  void add_polls(std::vector<pollfd> &polls) const;
  // `takes`: also accepts new connections; if false, these wait in the kernel.
  std::vector<Newcomer> look(bool takes = true);
  // Says why connections could not be accepted; empty: they could.
  std::string problem() const { return acceptor_.pause().problem(); }

 private:
  struct Silent {
    FrameStream stream;
    Clock::time_point deadline;
  };

  const NodePlan &plan_;
  Acceptor acceptor_;
  std::vector<Silent> silent_;  // leaders that have proven the secret and have sent nothing yet
};

// The leaders connect in a tree, each child to its parent.

using NodeLinks = std::map<uint32_t, FrameStream>;  // connections with the neighbours in the tree, by node

// Blocks until all neighbours are connected, at most for the plan's forming_ms, because all leave the rendezvous at
// about the same time. If it throws, `links` has the connections made so far.
void form_tree(const NodePlan &plan, const Fd &listener, const Waiter &waiter, NodeLinks &links);

}  // namespace fsdp::membership
