// SPDX-License-Identifier: Apache-2.0
// NCCL compares nothing and takes nothing back: what ranks have enqueued is compared here, and what cannot end is
// aborted and its communicators made anew.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "transport/exchange.h"
#include "transport/nccl/seat.h"

namespace fsdp::transport::nccl {
namespace {

constexpr std::chrono::milliseconds longest_doubt = std::chrono::seconds(10), look_again(20);
// A communicator that a graph holds ends when that is destroyed, and no sooner.
constexpr std::chrono::milliseconds graph_patience = std::chrono::seconds(10);

}  // namespace

Seat::Rounds Seat::exchange_rounds(bool abandoned) {
  Round mine;
  mine.abandoned = abandoned;
  for (const auto &launches : open_) {
    if (mine.count == Round::most) break;
    mine.captured |= uint64_t{launches->connection().captured()} << mine.count;
    mine.histories[mine.count++] = launches->history();
  }
  Rounds all(size());
  doubt();
  host_->all_gather(&mine, sizeof mine, all.data(), "the collectives of a round");
  captured_.clear();
  for (const Round &round : all) captured_.push_back(round.captured);
  return all;
}

void Seat::doubt() noexcept {
  const std::chrono::milliseconds part(waiter_.timeout_ms() / 4);
  for (const auto &launches : open_) launches->connection().handle()->doubt(std::min(part, longest_doubt));
}

void Seat::trust() noexcept {
  for (const auto &launches : open_) launches->connection().handle()->doubt({});
}

// Other teams may differ where this one does not: the next collective, or the end of the round, shows that nobody has
// cut anything.
bool Seat::ends_alike() {
  const Rounds all = exchange_rounds(true);
  return std::all_of(all.begin(), all.end(), [&](const Round &round) { return same(round, all.front()); });
}

bool Seat::same(const Round &a, const Round &b) noexcept {
  const auto equal = [](const History &x, const History &y) { return x.hash == y.hash; };
  return a.count == b.count && std::equal(a.histories, a.histories + a.count, b.histories, equal);
}

void Seat::end_round(Launches &ended) {
  const Rounds all = exchange_rounds(ended.abandoned());
  const Round &mine = all[rank()];
  const bool given_up = std::all_of(all.begin(), all.end(), [](const Round &round) { return round.abandoned != 0; });
  bool agreed = true;  // if not and nobody gave up, one's own difference comes up below
  for (uint32_t r = 0; r < size(); ++r)
    for (size_t i = 0; i < std::min(mine.count, all[r].count); ++i) {
      if (all[r].histories[i].hash == all[0].histories[i].hash) continue;
      agreed = false;
      const uint32_t other = r == rank() ? 0 : r;
      if (!given_up && all[other].histories[i].hash != mine.histories[i].hash)
        fail_history(i, other, mine.histories[i], all[other].histories[i]);
    }
  if (agreed) {
    trust();
  } else {
    cut();
    renew();
  }
  ended.next_round();
}

void Seat::cut() noexcept {
  for (const auto &launches : open_) Handle::abort(launches->connection().handle());
}

// It has been aborted on all ranks.
void Seat::reopen(Launches &launches) {
  const ConnectionPlan before = launches.connection().plan();
  const std::string what = format_text("NCCL communicator '{}', made anew", before.name);
  const UniqueId id = share_id(what);
  attempt_together(*host_, what, [&] {
    launches.replace(std::make_unique<Connection>(library_, plan(before.name, before.copy_engines), device_, waiter_));
    join(launches.connection(), id);
  });
  register_all(launches);
}

// Of ranks that are threads of one process NCCL ends all communicators with the last one's, and waits for the graphs of
// all.
std::optional<uint32_t> Seat::find_holder(const Launches &launches) const {
  if (launches.connection().captured()) return rank();
  const auto is_it = [&](const auto &one) { return one.get() == &launches; };
  const auto index = std::find_if(open_.begin(), open_.end(), is_it) - open_.begin();
  for (uint32_t r = 0; r < captured_.size(); ++r)
    if (captured_[r] >> index & 1) return r;
  return std::nullopt;
}

// What waits on the GPU is free at once; what the caller's own streams still compute an abort waits for, too.
void Seat::await_end(const Launches &launches, Clock::time_point start) const {
  const Connection &connection = launches.connection();
  const std::optional<uint32_t> holder = find_holder(launches);
  std::chrono::milliseconds patience(waiter_.timeout_ms() - waiter_.timeout_ms() / 4);
  if (holder) patience = std::min(patience, graph_patience);
  while (!connection.handle()->await_end(look_again)) {
    waiter_.poll();
    if (Clock::now() - start < patience) continue;
    if (holder)
      fail(FSDP_INVALID_STATE,
           "rank {}: graphs have captured work of NCCL communicator '{}' on rank {}, which is being aborted: they "
           "cannot be launched any more, and it does not end before they are destroyed",
           host_->world_rank(rank()), connection.plan().name, host_->world_rank(*holder));
    fail(FSDP_TIMEOUT, "rank {}: ncclCommAbort of NCCL communicator '{}' has not returned within {} ms",
         host_->world_rank(rank()), connection.plan().name, patience.count());
  }
}

// Sooner than the others' wait for this rank's word ends.
void Seat::await_ends(std::span<const std::shared_ptr<Launches>> all) {
  const auto start = Clock::now();
  attempt_together(*host_, "the end of NCCL communicators", [&] {
    for (const auto &launches : all) await_end(*launches, start);
  });
}

// NCCL keeps the error of a registration for ever.
void Seat::start_over(Launches &launches) {
  Handle::abort(launches.connection().handle());
  const std::shared_ptr<Launches> one(std::shared_ptr<void>(), &launches);  // not owned
  await_ends({&one, 1});
  reopen(launches);
}

void Seat::renew() {
  try {
    await_ends(open_);
    for (const auto &launches : open_) reopen(*launches);
    launched_ = 0;
  } catch (const Error &error) {
    failure_.set(error);
    throw;
  }
}

// What was enqueued on the GPU cannot be taken back, and does not end.
void Seat::fail_history(size_t index, uint32_t peer, const History &mine, const History &theirs) {
  const auto last = [](const History &history) {
    return std::string(history.last, ::strnlen(history.last, sizeof history.last));
  };
  const Error error(
      FSDP_MISMATCH,
      format_text(
          "ranks have enqueued different collectives, or others in between, on NCCL "
          "communicator '{}', and NCCL cannot take them back: rank {} {} of them, the last {}; rank {} {}, the last {}",
          open_[index]->connection().plan().name, host_->world_rank(rank()), mine.count, last(mine),
          host_->world_rank(peer), theirs.count, last(theirs)),
      static_cast<int32_t>(host_->world_rank(peer)));
  failure_.set(error);
  throw error;
}

}  // namespace fsdp::transport::nccl
