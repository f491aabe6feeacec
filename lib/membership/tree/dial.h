// SPDX-License-Identifier: Apache-2.0
// Connections between leaders, from both sides: both ends prove the job secret, then the one that has connected says
// which node it leads, and is answered.
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

// Where a leader waits for the leaders of other nodes. Every rank opens one before the ranks meet, since it is not
// known yet which ranks will lead; those that do not lead close it.

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
    ended,   // the connection did, or there was no answer: another try may succeed
    refused  // by what the other end has said, or since no process listens there
  };

  // The plan outlives it.
  Dial(const NodePlan &plan, uint32_t to, tree::Bond bond);

  uint32_t to() const noexcept { return to_; }
  State advance();
  State state() const noexcept { return state_; }
  // Of one that failed; of one that tries, what it waits for.
  const std::string &problem() const noexcept { return problem_; }
  // No process listens where that node's leader has listened: the leader has ended.
  bool nobody_listens() const noexcept { return deserted_; }
  pollfd poll() const;
  // Of one that was answered.
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
  FrameStream stream_;  // once proven
};

// The side that is connected to: hands on the leaders that have proven the job secret and said which node they lead.
// Never waits.
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
  // takes: new connections too; else these wait in the kernel.
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
  std::vector<Silent> silent_;  // have proven the secret, and said nothing yet
};

// The leaders connect in a tree: a child to its parent, both prove the job secret, and the child says which node it is,
// and is answered.

using NodeLinks = std::map<uint32_t, FrameStream>;  // of each neighbour in the tree, by node

// Blocks until all neighbours have come, at most the plan's forming_ms: they come out of one rendezvous. links: what
// there is so far, where it throws.
void form_tree(const NodePlan &plan, const Fd &listener, const Waiter &waiter, NodeLinks &links);

}  // namespace fsdp::membership
