// SPDX-License-Identifier: Apache-2.0
// From the moment a rank joins until all have met, the connections by which the ranks have joined stay open. Rank 0
// hears which rank dies or gives up, and names it to all others. They see whether rank 0 and the ranks between live.
// What ranks watch each other with afterwards does not exist yet, or not everywhere.
//
// Looked at by the waits of the caller's thread, as its Waiter's task. If the job does not form, rank 0's verdict is
// what all ranks give.
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

// What is below a rank while ranks join: one connection, of a rank that has joined there, and those that have come
// through it.

// A rank takes this many from other hosts, and sends more on to them.
constexpr size_t join_degree = 64;

struct Branch {
  FrameStream stream;
  uint32_t rank = 0;  // the rank at its other end
  std::string host, listens;
  bool other_host = false;
  bool watched = true;               // its end would be a death
  std::vector<uint32_t> ranks = {};  // that have joined by it, its own first
  bool has(uint32_t wanted) const { return std::find(ranks.begin(), ranks.end(), wanted) != ranks.end(); }
};

class Branches {
 public:
  Branch &add(FrameStream stream, const message::Join &join, bool other_host);
  std::list<Branch> &all() noexcept { return all_; }
  // By which this rank has joined; NULL: none.
  Branch *of(uint32_t rank);
  // The rank to which the next one from another host is sent; empty: it is taken here. near: it has come by a loopback
  // address.
  std::optional<message::Redirect> redirect(bool near);

  void add_polls(std::vector<pollfd> &polls) const;
  void queue(const SharedFrame &frame);
  // True when all has gone, or will never go.
  bool flush();
  // For a short while, since none is listened to any more. No memory: the ends of the connections say that something is
  // wrong.
  void tell_last(const message::Message &word) noexcept;
  void clear() { all_.clear(); }

 private:
  std::list<Branch> all_;
  size_t turn_ = 0;
};

// The frame again, for others.
SharedFrame pass_on(const Frame &frame);

// One that ends without finish tells the others that this rank gives up, if settle has not said why.
class FormingWatch : public WaitTask {
 public:
  virtual ~FormingWatch() = default;
  // All have met, and watch each other.
  virtual void finish() noexcept = 0;
};

namespace forming {

using namespace std::chrono_literals;

constexpr auto look_period = 5ms;
constexpr auto doubt = 300ms;        // for the end of a peer to be seen by rank 0, when another rank has felt it
constexpr auto answer_time = 600ms;  // for rank 0's verdict after a report
constexpr auto farewell = 200ms;
constexpr auto lateness = 700ms;  // beyond the deadline: waits with a limit of their own name the late rank

// A peer is to blame, or the link to it, but perhaps only because of another one that rank 0 knows of.
bool blames_others(const Error &error, uint32_t rank);
Error late(std::chrono::steady_clock::time_point deadline);
// What was queued goes out, if the other end takes it soon.
void flush_soon(FrameStream &stream, std::chrono::steady_clock::time_point end) noexcept;
void give_up(FormingWatch &watch) noexcept;

}  // namespace forming

// With these codes of a FrameStream its other end's host is silent: no process is to blame.
bool host_is_silent(int code) noexcept;
Accusation lost_contact(const std::string &one, const std::string &other);
// A peer sent what is no message.
Accusation no_message(uint32_t rank, const std::string &host);
// EBADMSG: nor is a process to blame whose words were changed on their way.
Error changed_contact(const std::string &one, const std::string &other, const std::string &problem);

// accuse_for a rank of this host.
Accusation accusation_of(const Error &error, uint32_t rank);

// Rank 0's watch, and what it knows of all ranks that have joined.

class RootFormingWatch final : public FormingWatch {
 public:
  using Clock = std::chrono::steady_clock;
  struct Party {
    bool taken = false;  // a rank has joined as this one
    std::string host_id, host;
    std::optional<std::vector<std::byte>> card;
  };
  // A rank that another one has let in says so.
  using Admit = std::function<void(Branch &branch, message::Join &join)>;

  // deadline: of the whole; beyond it, waits that have a limit of their own are over.
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
  // False: nothing that such a rank says.
  bool obey(Branch &branch, Frame &frame);
  bool obey(Branch &branch, const Report &said);
  void check_end(Branch &branch);
  void report_loss(const Branch &branch);
  void report(const Accusation &accusation);
  // Nothing: it is not time for it.
  std::optional<Error> verdict() const;
  std::string own_text() const;

  const Waiter &waiter_;
  Clock::time_point deadline_, looked_{};
  Admit admit_;
  std::vector<Party> parties_;  // by rank
  size_t cards_ = 0;
  Branches branches_;
  Coordinator coordinator_;
  std::optional<Error> end_;
  bool finished_ = false;
};

}  // namespace fsdp::membership
