// SPDX-License-Identifier: Apache-2.0
// The thread that a call of Channel's runs on: it waits, sums, and gives up.
#include <algorithm>

#include "device/host/kernels.h"
#include "transport/call/launch.h"
#include "transport/message/channel/channel.h"

namespace fsdp::transport::messages {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto drop_time = std::chrono::seconds(2);

}  // namespace

// What the thread of a call waits for: a chunk that all ranks have sent, or the end.
class Channel::AwaitedCall final : public Awaited {
 public:
  AwaitedCall(Channel &channel, const Launch &launch, bool on_caller)
      : channel_(channel), launch_(launch), on_caller_(on_caller) {}
  bool come() override {
    if (!channel_.attention_.load(std::memory_order_acquire)) return false;
    channel_.attention_.store(false);  // first: what happens while this looks is looked at again
    channel_.look();
    const auto lock = channel_.transport_.lock();
    const bool come = channel_.can_sum() || channel_.done();
    // A lost peer is looked at again until there is a verdict.
    if (come || channel_.failed_since_ != Clock::time_point()) channel_.attention_.store(true);
    return come;
  }
  bool given_up() override { return channel_.round_.hopeless(phase_of(launch_.round, launch_.number, Phase::read)); }
  void sleep(uint32_t ms) override {
    auto lock = channel_.transport_.lock();
    const bool failing = channel_.failed_since_ != Clock::time_point();
    channel_.transport_.changed().wait_for(lock, std::chrono::milliseconds(ms), [&] {
      return !failing && channel_.attention_.load(std::memory_order_relaxed);
    });
  }
  bool misses(uint32_t world_rank) const override {
    const auto lock = channel_.transport_.lock();
    const uint32_t r = channel_.lane_of(world_rank);
    return r < channel_.size() && channel_.misses(r);
  }
  // Data may be late because another rank is; who has not come at all is to blame for that.
  bool lags(uint32_t world_rank) const override {
    if (!misses(world_rank)) return false;
    const auto lock = channel_.transport_.lock();
    bool all_met = true;
    for (uint32_t r = 0; r < channel_.size(); ++r) all_met = all_met && (r == channel_.rank_ || channel_.lanes_[r].met);
    return all_met || !channel_.lanes_[channel_.lane_of(world_rank)].met;
  }
  std::span<const uint32_t> concerned() const override { return channel_.ranks_; }
  bool misses_caller(uint32_t world_rank) const override {
    return channel_.misses_caller(world_rank, launch_, on_caller_);
  }
  Late late() const override { return Late::by_messages; }
  std::string text() const override { return launch_.fingerprint.text(launch_.number); }

 private:
  Channel &channel_;
  const Launch &launch_;
  bool on_caller_;
};

// After a call was given up: until nothing of it reads or writes the caller's memory any more.
class Channel::AwaitedQuiet final : public Awaited {
 public:
  explicit AwaitedQuiet(Channel &channel) : channel_(channel) {}
  bool come() override {
    const auto lock = channel_.transport_.lock();
    return channel_.quiet();
  }
  void sleep(uint32_t ms) override {
    auto lock = channel_.transport_.lock();
    channel_.transport_.changed().wait_for(lock, std::chrono::milliseconds(ms), [&] { return channel_.quiet(); });
  }
  bool misses(uint32_t world_rank) const override {
    const auto lock = channel_.transport_.lock();
    const uint32_t r = channel_.lane_of(world_rank);
    return r < channel_.size() && channel_.lanes_[r].in_flight > 0;
  }
  std::string text() const override { return "the end of what was under way in a discarded step"; }

 private:
  Channel &channel_;
};

void Channel::begin(const Launch &launch) {
  Call::place_own(launch, rank_);
  const auto lock = transport_.lock();
  call_.start(launch, rank_, size(), chunk_bytes_);
  if (call_.reduces() && !scratch_) fail(FSDP_INTERNAL, "{} on a channel that does not sum", launch.fingerprint.name);
  active_ = true;
  summed_ = 0;
  failed_since_ = {};
  for (Lane &lane : lanes_) {
    lane.met = lane.different = false;
    lane.reduce_sent = lane.gather_sent = lane.gather_arrived = 0;
    lane.reduce_allowed = window_;
    std::fill(lane.arrived.begin(), lane.arrived.end(), 0);
  }
  raise(words_[rank_].phase, phase_of(launch.round, launch.number, Phase::ready));
  Header hello = header(Kind::call);
  hello.bytes = chunk_bytes_;
  tell(hello, &launch.fingerprint, sizeof launch.fingerprint);
  for (Lane &lane : lanes_) {
    const Hello &earlier = lane.hellos[launch.number % hellos_kept];
    if (earlier.round == launch.round && earlier.number == launch.number) meet(lane, earlier);
  }
  move_on();
  attention_.store(true, std::memory_order_release);
}

bool Channel::run(const Launch &launch, bool on_caller) {
  if (round_.skipped(launch.round)) {
    round_.break_at(phase_of(launch.round, launch.number, Phase::ready), launch.fingerprint.text(launch.number));
    tell_end();
    return false;
  }
  try {
    begin(launch);  // it may throw behind what it has sent
    for (;;) {
      AwaitedCall awaited(*this, launch, on_caller);
      if (!seat_->watch.wait(awaited)) {
        give_up(launch);
        return false;
      }
      auto lock = transport_.lock();
      if (can_sum()) {
        lock.unlock();
        sum_next();
        continue;
      }
      active_ = false;
      raise(words_[rank_].phase, phase_of(launch.round, launch.number, Phase::read));
      return true;
    }
  } catch (...) {
    drop();
    throw;
  }
}

// row: what the others sent. a + b and b + a are the same bits: of two ranks neither sum needs a copy.
void Channel::add_chunk(std::byte *row, const ByteSpan &own, const ByteSpan &to, bool accumulate) const {
  const uint64_t count = own.bytes / sizeof(float);
  const auto add = [&](const std::byte *from) {
    device::kernels::add(to.data, FSDP_FLOAT32, from, FSDP_FLOAT32, count);
  };
  if (count == 0) return;
  if (accumulate) {
    for (uint32_t r = 0; r < size(); ++r) add(r == rank_ ? own.data : row + r * chunk_bytes_);
  } else if (size() == 2 && to.data == own.data) {
    add(row + (1 - rank_) * chunk_bytes_);
  } else {
    device::kernels::copy_bytes(row + rank_ * chunk_bytes_, own.data, own.bytes);
    add_in_rank_order(row, chunk_bytes_, size(), reinterpret_cast<float *>(to.data), count, false);
  }
}

// The sum itself is made without the mutex: the next chunks travel meanwhile.
void Channel::sum_next() {
  const uint64_t chunk = summed_;  // only this thread changes it
  bool accumulate = false;
  const ByteSpan own = call_.slice(rank_, chunk), to = call_.sum(chunk, accumulate);
  add_chunk(scratch_->data() + chunk % window_ * size() * chunk_bytes_, own, to, accumulate);
  const auto lock = transport_.lock();
  ++summed_;
  Header credit = header(Kind::credit);
  credit.chunk = summed_;
  // Not for every place: a message costs as much as the sum of a small chunk.
  if (const uint64_t step = window_ / 4; summed_ % step == 0 && summed_ - step + window_ < call_.chunks())
    tell(credit, nullptr, 0);
  move_on();
  if (size() > 1) transport_.wake();
}

// Peers are told first, so that they do not go on either.
void Channel::give_up(const Launch &launch) {
  {
    const auto lock = transport_.lock();
    active_ = false;
  }
  round_.break_at(phase_of(launch.round, launch.number, Phase::read), launch.fingerprint.text(launch.number));
  tell_end();
  AwaitedQuiet quiet(*this);
  seat_->watch.wait(quiet);
}

// The job is lost, or this channel ends: nothing may use the caller's memory afterwards.
void Channel::drop() noexcept {
  auto lock = transport_.lock();
  active_ = false;
  if (quiet()) return;
  for (uint32_t r = 0; r < size(); ++r)
    if (r != rank_) transport_.cut(ranks_[r]);
  const auto ended = [&] { return quiet(); };
  if (transport_.traits().cuts_surely)
    transport_.changed().wait(lock, ended);
  else
    transport_.changed().wait_for(lock, drop_time, ended);
}

}  // namespace fsdp::transport::messages
