// SPDX-License-Identifier: Apache-2.0
// Watches the ranks while the job forms. The connections over which the ranks have joined stay open until the job has
// formed on all ranks. Over them rank 0 learns which rank dies or gives up, and names that rank to all others. The
// other ranks see over them whether rank 0 and the ranks between live. The heartbeats of the running job do not exist
// yet, or not on all ranks.
//
// Waits on the caller's thread run this watch, as the task of their Waiter. If the job does not form, all ranks return
// rank 0's verdict.
#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "base/failure.h"
#include "membership/join/message.h"
#include "membership/tree/coordinator.h"
#include "membership/verdict.h"
#include "membership/wire/frame_stream.h"

namespace fsdp::membership {

// A branch is the part of the job below a rank while ranks join: one connection to a rank that has joined here, and all
// ranks that have joined through that rank.

// A rank accepts this many ranks from other hosts, and redirects further ones to these.
constexpr size_t join_degree = 64;

struct Branch {
  FrameStream stream;
  uint32_t rank = 0;  // the rank at the other end of the connection
  std::string host, listens;
  bool other_host = false;
  bool watched = true;               // if the connection ends, that counts as a death
  std::vector<uint32_t> ranks = {};  // all ranks that have joined through it; the first is `rank` itself
  bool has(uint32_t wanted) const { return std::find(ranks.begin(), ranks.end(), wanted) != ranks.end(); }
};

class Branches {
 public:
  Branch &add(FrameStream stream, const message::Join &join, bool other_host);
  std::list<Branch> &all() noexcept { return all_; }
  // The branch through which that rank has joined; NULL: there is none.
  Branch *of(uint32_t rank);
  // The rank to which the next rank from another host is sent; empty: this rank accepts it. `near`: it has connected to
  // a loopback address.
  std::optional<message::Redirect> redirect(bool near);

  void add_polls(std::vector<pollfd> &polls) const;
  void queue(const SharedFrame &frame);
  // True when nothing is left to send, except to connections that have ended.
  bool flush();
  // Sends the last message to all branches, and waits only a short while for those that do not read it. If there is no
  // memory for the message, the ends of the connections tell that something is wrong.
  void tell_last(const message::Message &word) noexcept;
  void clear() { all_.clear(); }

 private:
  std::list<Branch> all_;
  size_t turn_ = 0;
};

// Makes the same frame for sending it on to other ranks.
SharedFrame pass_on(const Frame &frame);

// If a watch is destroyed without finish(), it tells the others that this rank gives up, unless settle() has told them
// the reason.
class FormingWatch : public WaitTask {
 public:
  virtual ~FormingWatch() = default;
  // Called when the job has formed: from now on the ranks watch each other by other means.
  virtual void finish() noexcept = 0;
};

namespace forming {

using namespace std::chrono_literals;

constexpr auto look_period = 5ms;
constexpr auto doubt = 300ms;        // time in which the cause of a failure becomes known, after one of its effects
constexpr auto answer_time = 600ms;  // time in which rank 0's verdict comes after a report
constexpr auto farewell = 200ms;
constexpr auto lateness = 700ms;  // time after the deadline in which waits with their own limits name the late rank

// Does the error blame a peer or the link to it? If so, the cause may be another peer, which rank 0 knows.
bool blames_others(const Error &error, uint32_t rank);
Error late(std::chrono::steady_clock::time_point deadline);
// Sends the queued frames, as far as the other end reads them before `end`.
void flush_soon(FrameStream &stream, std::chrono::steady_clock::time_point end) noexcept;
void give_up(FormingWatch &watch) noexcept;

}  // namespace forming

// Does the code of a FrameStream say that the other end's host is silent? In that case no process is to blame.
bool host_is_silent(int code) noexcept;
Accusation lost_contact(const std::string &one, const std::string &other);
// For a peer that sent bytes that are not a message.
Accusation no_message(uint32_t rank, const std::string &host);
// For EBADMSG: bytes were changed in transit, so no process is to blame either.
Error changed_contact(const std::string &one, const std::string &other, const std::string &problem);

// accuse_for, with the name of this host.
Accusation accusation_of(const Error &error, uint32_t rank);

// Rank 0's watch, with its knowledge of all ranks that have joined.

class RootFormingWatch final : public FormingWatch {
 public:
  using Clock = std::chrono::steady_clock;
  struct Party {
    bool taken = false;  // a process has joined as this rank
    std::string host_id, host;
    std::optional<std::vector<std::byte>> card;
  };
  // Called when the rank of that branch passes on the Join of a rank that it has accepted.
  using Admit = std::function<void(Branch &branch, message::Join &join)>;

  // `deadline` is for the whole forming; waits with limits of their own also end by then.
  RootFormingWatch(uint32_t size, Clock::time_point deadline, const Waiter &waiter, Admit admit);
  ~RootFormingWatch() override;

  std::vector<Party> &parties() noexcept { return parties_; }
  Branches &branches() noexcept { return branches_; }
  void take(uint32_t rank, std::string host_id, std::string host);
  void set_card(uint32_t rank, std::vector<std::byte> card);
  bool complete() const noexcept { return cards_ == parties_.size(); }

  void look() override;
  Error settle(const Error &error) override;
  void finish() noexcept override;

 private:
  void hear_all();
  void hear(Branch &branch);
  // Returns false if the message is not one that a joined rank sends.
  bool obey(Branch &branch, Frame &frame);
  bool obey(Branch &branch, const Report &said);
  void check_end(Branch &branch);
  void report_loss(const Branch &branch);
  void report(const Accusation &accusation);
  // Empty if nothing was reported, or if it is too early to decide.
  std::optional<Error> verdict() const;
  std::string own_text() const;

  const Waiter &waiter_;
  Clock::time_point deadline_, looked_{};
  Admit admit_;
  std::vector<Party> parties_;  // index: rank
  size_t cards_ = 0;
  Branches branches_;
  Coordinator coordinator_;
  std::optional<Error> end_;
  bool finished_ = false;
};

}  // namespace fsdp::membership
