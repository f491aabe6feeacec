// SPDX-License-Identifier: Apache-2.0
// NCCL compares nothing and takes nothing back: what ranks have enqueued is compared here, and what cannot end is
// aborted and its communicators made anew.
#include <algorithm>
#include <cstring>

#include "comm/nccl/seat.h"
#include "comm/together.h"

namespace fsdp::comm::nccl {

Seat::Rounds Seat::exchange_rounds(bool abandoned) {
  Round mine;
  mine.abandoned = abandoned;
  for (const auto &launches : open_)
    if (mine.count < Round::most) mine.histories[mine.count++] = launches->history();
  Rounds all(size());
  host_->exchange_fixed(&mine, sizeof mine, all.data(), "the collectives of a round");
  return all;
}

bool Seat::agree() {
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
  if (!agreed) {
    cut();
    renew();
  }
  ended.next_round();
}

void Seat::cut() noexcept {
  for (const auto &launches : open_) Handle::abort(launches->connection().handle());
}

void Seat::renew() {
  try {
    await_ends(open_);
    for (const auto &launches : open_) reopen(*launches);
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
  const Error error(FSDP_MISMATCH,
                    format_text("ranks have enqueued different collectives on NCCL communicator '{}', and NCCL cannot "
                                "take them back: rank {} "
                                "{} of them, the last {}; rank {} {}, the last {}",
                                open_[index]->connection().plan().name, host_->world_rank(rank()), mine.count,
                                last(mine), host_->world_rank(peer), theirs.count, last(theirs)),
                    static_cast<int32_t>(host_->world_rank(peer)));
  failure_.set(error);
  throw error;
}

}  // namespace fsdp::comm::nccl
