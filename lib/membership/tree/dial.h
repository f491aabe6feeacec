// SPDX-License-Identifier: Apache-2.0
// Connections between leaders, from both sides: both ends prove the job secret, then the leader that has connected says
// which node it leads, and the other answers.
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

// Where a leader listens for the leaders of other nodes. Every rank opens a listener before the ranks meet, since it is
// not known yet which ranks will lead. Ranks that do not lead close it.

struct LeaderListener {
  Fd stream;            // TCP, listening
  Fd datagrams;         // UDP at the same port: heartbeats
  std::string address;  // for the other leaders
};

// On the interface of this numeric address alone.
LeaderListener open_leader_listener(const std::string &interface_address);

// The side that connects. Never waits.
class Dial {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State {
    trying,
    answered,
    ended,   // the connection ended, or there was no answer: another try may succeed
    refused  // the other end is no leader of this job, or no process listens there
  };

  // The plan outlives it.
  Dial(const NodePlan &plan, uint32_t to, tree::Bond bond);

  uint32_t to() const noexcept { return to_; }
  State advance();
  State state() const noexcept { return state_; }
  // Why the dial has failed or, while it tries, what it waits for.
  const std::string &problem() const noexcept { return problem_; }
  // No process listens where that node's leader has listened: the leader has ended.
  bool nobody_listens() const noexcept { return deserted_; }
  pollfd poll() const;
  // The connection, once the dial was answered.
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
  FrameStream stream_;  // once both ends have proven the secret
};

// The side that listens: hands on the connections of leaders that have proven the job secret and said which node they
// lead. Never waits.
class Newcomers {
 public:
  using Clock = std::chrono::steady_clock;
  struct Newcomer {
    tree::LinkHello hello;
    FrameStream stream;
  };

  // Both outlive it.
  Newcomers(const NodePlan &plan, const Fd &listener);

  void add_polls(std::vector<pollfd> &polls) const;
  // takes: accepts new connections, too; else those wait in the kernel.
  std::vector<Newcomer> look(bool takes = true);
  // Why connections could not be taken; empty: they could.
  std::string problem() const { return acceptor_.pause().problem(); }

 private:
  struct Silent {
    FrameStream stream;
    Clock::time_point deadline;
  };

  const NodePlan &plan_;
  Acceptor acceptor_;
  std::vector<Silent> silent_;  // leaders that have proven the secret, and said nothing yet
};

// The leaders connect in a tree, each child to its parent, as above.

using NodeLinks = std::map<uint32_t, FrameStream>;  // connections with the neighbours in the tree, by node

// Blocks until all neighbours are connected, at most for the plan's forming_ms: all leave the rendezvous at about the
// same time. If it throws, links has the connections made so far.
void form_tree(const NodePlan &plan, const Fd &listener, const Waiter &waiter, NodeLinks &links);

}  // namespace fsdp::membership
