// SPDX-License-Identifier: Apache-2.0
#include "membership/liveness/waits.h"

#include <algorithm>

#include "base/error.h"
#include "membership/liveness/watch.h"

namespace fsdp::membership {
namespace {

constexpr uint64_t looks_of_a_neighbour = 2;
// Messages over the network may have to be sent again before they arrive, which takes a second or more.
constexpr uint64_t late_looks = 60;

}  // namespace

std::string Waits::text(uint32_t rank) const {
  WaitTexts::Copy text;
  const uint64_t shown = entries_[rank].wait_and_looks.load(std::memory_order_seq_cst);
  return texts_->load(rank, wait_number(shown), text) ? text.copy() : "another call";
}

std::optional<uint32_t> first_missed_caller(const Awaited &awaited, uint32_t world_size, uint32_t rank) {
  std::optional<uint32_t> first;
  for (const uint32_t r : awaited.concerned())
    if (r != rank && (!first || r < *first) && awaited.misses_caller(r)) first = r;
  if (!awaited.concerned().empty()) return first;
  for (uint32_t r = 0; r < world_size; ++r)
    if (r != rank && awaited.misses_caller(r)) return r;
  return std::nullopt;
}

void StreamWaits::begin(StreamWait &entry) {
  const std::lock_guard lock(mutex_);
  entries_.push_back(&entry);
  entry.number = ++numbers_;
}

void StreamWaits::look(StreamWait &entry, std::optional<uint32_t> awaited_rank) {
  const std::lock_guard lock(mutex_);
  entry.awaited_rank = awaited_rank;
  ++entry.looks;
}

void StreamWaits::end(const StreamWait &entry) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(entries_, &entry);
}

std::optional<StreamWaits::StreamWait> StreamWaits::find(uint64_t thread) const {
  const std::lock_guard lock(mutex_);
  for (const StreamWait *entry : entries_)
    if (entry->thread == thread) return *entry;
  return std::nullopt;
}

void StreamWait::look(std::optional<uint32_t> awaited_rank, const Awaited &awaited) {
  if (!entry_.number) {
    entry_.text = awaited.text();
    entry_.late = awaited.late();
    waits_.begin(entry_);
  }
  waits_.look(entry_, awaited_rank);
}

void ShownWait::hide() noexcept {
  if (!shown_) return;
  std::atomic<uint64_t> &mine = entries_[rank_].wait_and_looks;
  const uint32_t number = wait_number(mine.load(std::memory_order_relaxed));
  mine.store(wait_and_looks(number, 0), std::memory_order_seq_cst);
  shown_ = false;
  suspects_.clear();
}

void ShownWait::show(std::optional<uint32_t> awaited_rank, Late late) noexcept {
  WaitEntry &mine = entries_[rank_];
  if (!shown_) {
    mine.late.store(late, std::memory_order_relaxed);
    const uint32_t number = wait_number(mine.wait_and_looks.load(std::memory_order_relaxed));
    mine.wait_and_looks.store(wait_and_looks(uint64_t{number} + 1, 0), std::memory_order_relaxed);
    shown_ = true;
    text_shown_ = false;
  }
  // A reader of the rank must also see the number of its wait.
  mine.awaited_rank.store(awaited_rank.value_or(UINT32_MAX), std::memory_order_release);
  mine.wait_and_looks.fetch_add(1, std::memory_order_seq_cst);
}

// Each rank in a cycle of waits finds the cycle itself, and shows the text of its wait before it looks again. Before a
// rank reports the cycle, it waits until all have looked again, so it finds all texts.
void ShownWait::show_text(const std::string &call, const std::string &what) {
  if (text_shown_) return;
  const uint64_t mine = entries_[rank_].wait_and_looks.load(std::memory_order_relaxed);
  entries_.show_text(rank_, wait_number(mine), format_text("{} ({})", call, what));
  text_shown_ = true;
}

std::vector<uint32_t> ShownWait::look(std::optional<uint32_t> awaited_rank, const std::string &call,
                                      const Awaited &awaited) {
  show(awaited_rank, awaited.late());
  if (in_cycle()) show_text(call, text_shown_ ? std::string() : awaited.text());
  return find_cycle();
}

// Counts the stream's own looks, because the caller knows only what the stream has seen.
std::vector<uint32_t> ShownWait::look_through(const std::optional<StreamWaits::StreamWait> &stream,
                                              const std::string &call) {
  if (!stream || stream->number != stream_number_) hide();
  if (!stream) return {};
  if (stream->number == stream_number_ && stream->looks == stream_looks_) return {};
  stream_number_ = stream->number;
  stream_looks_ = stream->looks;
  show(stream->awaited_rank, stream->late);
  if (in_cycle()) show_text(call, stream->text);
  return find_cycle();
}

bool ShownWait::in_cycle() const noexcept {
  uint32_t at = rank_;
  for (uint32_t steps = 0; steps < world_size_; ++steps) {
    if (look_count(entries_[at].wait_and_looks.load(std::memory_order_seq_cst)) == 0) return false;
    at = entries_[at].awaited_rank.load(std::memory_order_relaxed);
    if (at == rank_) return true;
    if (at >= world_size_) return false;
  }
  return false;  // a cycle of other ranks; those ranks find it themselves
}

// What a peer shows may be older than the last action of another rank. So each rank of the cycle must have looked at
// least twice since this rank first saw the cycle, and more often if one of them is late. All must still be in the
// same waits for the same ranks. Then each rank knows everything that the next one did before its wait began, and no
// rank can go on first. It is enough that each rank names the first rank that it misses: these names lead to a rank
// that does not wait, or to a cycle.
std::vector<uint32_t> ShownWait::find_cycle() {
  if (!in_cycle()) {
    suspects_.clear();
    return {};
  }
  std::vector<SeenWait> cycle;
  uint32_t at = rank_;
  do {
    cycle.push_back({at, entries_[at].wait_and_looks.load(std::memory_order_seq_cst)});
    at = entries_[at].awaited_rank.load(std::memory_order_relaxed);
  } while (at != rank_ && at < world_size_ && cycle.size() < world_size_);
  const bool same =
      at == rank_ && std::equal(cycle.begin(), cycle.end(), suspects_.begin(), suspects_.end(),
                                [](const SeenWait &now, const SeenWait &then) {
                                  return now.rank == then.rank && same_wait(now.wait_and_looks, then.wait_and_looks);
                                });
  if (!same) {
    suspects_ = std::move(cycle);
    return {};
  }
  std::vector<uint32_t> ranks;
  const bool late = std::any_of(cycle.begin(), cycle.end(), [&](const SeenWait &seen) {
    return entries_[seen.rank].late.load(std::memory_order_relaxed) != Late::no;
  });
  const uint64_t looks = late ? late_looks : looks_of_a_neighbour;
  for (size_t i = 0; i < cycle.size(); ++i) {
    if (cycle[i].wait_and_looks < suspects_[i].wait_and_looks + looks) return {};
    ranks.push_back(cycle[i].rank);
  }
  return ranks;
}

}  // namespace fsdp::membership
