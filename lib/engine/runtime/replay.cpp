// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/replay.h"

namespace fsdp::engine {

void Replays::make_room() {
  const std::lock_guard lock(mutex_);
  for (Replay &replay : replays_) {
    replay.begun = context_.device().create_event();
    replay.ended = context_.device().create_event();
  }
}

void Replays::await_room() {
  const auto full = [this] {
    const std::lock_guard lock(mutex_);
    complete();
    return next_ - oldest_ == most;
  };
  if (!full()) return;
  context_.device().synchronize(*at(next_).ended);  // the entry of the oldest replay
  settle();
}

void Replays::join(device::Stream &caller) const { caller.wait(*at(next_).begun); }

void Replays::join_last(device::Stream &stream) const {
  if (next_) stream.wait(*at(next_ - 1).ended);
}

void Replays::prepare(uint32_t capture, const char *name, device::Stream &caller) {
  Replay &replay = at(next_);
  replay.capture = capture;
  replay.name = name;
  caller.record(*replay.begun);
}

void Replays::commit(device::Stream &caller) {
  const std::lock_guard lock(mutex_);
  Replay &replay = at(next_);
  caller.record(*replay.ended);
  replay.handle = flights_->enqueue("replay", replay.name, 0);
  flights_->flight().start(replay.handle);
  ++next_;
}

// Completes nothing once the context has failed, because streams then pass over work without doing it.
void Replays::complete() noexcept {
  if (context_.failure().failed()) return;
  for (; oldest_ < next_ && at(oldest_).ended->done(); ++oldest_) flights_->flight().complete(at(oldest_).handle);
}

void Replays::settle() noexcept {
  const std::lock_guard lock(mutex_);
  complete();
}

// Has the GPU begun a replay? While the GPU still does the caller's earlier work, the answer is no, because slow work
// is not stuck work.
bool Replays::at_oldest() noexcept {
  complete();
  if (oldest_ == next_ || !at(oldest_).begun->done()) return false;
  if (seen_ == oldest_) return true;
  seen_ = oldest_;
  since_ = Clock::now();
  return true;
}

void Replays::check() {
  std::unique_lock lock(mutex_);
  if (!at_oldest() || Clock::now() - since_ < std::chrono::milliseconds(context_.timeout_ms())) return;
  const Error error(
      FSDP_TIMEOUT,
      format_text("the replay of {} has been on the GPU of rank {} for {} ms and has not ended: a peer may not have "
                  "launched its graph",
                  at(oldest_).name, context_.rank(), context_.timeout_ms()));
  lock.unlock();
  context_.fail_for_good(error, false);
  throw error;
}

std::string Replays::describe_oldest() {
  const std::lock_guard lock(mutex_);
  if (!at_oldest()) return {};
  return format_text("the replay of {} has not ended on the GPU of rank {}", at(oldest_).name, context_.rank());
}

}  // namespace fsdp::engine
