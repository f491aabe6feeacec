// SPDX-License-Identifier: Apache-2.0
#include "transport/message/channel/channel.h"

#include <algorithm>

#include "device/host/kernels.h"
#include "transport/call/launch.h"

namespace fsdp::transport::messages {
namespace {

using Clock = std::chrono::steady_clock;
// Reading from the connections takes as long as several looks at memory, so a spinning thread reads only at every
// fourth look. A thread that has slept reads at each, because it must not blame a peer whose message is there.
constexpr uint32_t looks_per_read = 4;
constexpr auto drop_time = std::chrono::seconds(2);
// How long to wait for a verdict when a connection has ended, because the ranks that notice deaths know more than the
// connection tells. Leaders of nodes distinguish a death from a cut network; for a cut they need the heartbeat limit.
constexpr auto lone_verdict_time = std::chrono::milliseconds(500);
constexpr auto decision_time = std::chrono::milliseconds(1000);

}  // namespace

Channel::Channel(Transport &transport, std::shared_ptr<Seat> seat, std::vector<uint32_t> ranks, uint64_t key,
                 uint64_t chunk_bytes, uint64_t short_bytes, device::Device *sums_on, const std::string &what)
    : transport_(transport),
      seat_(std::move(seat)),
      lanes_(transport, std::move(ranks), key, chunk_bytes, short_bytes, sums_on, what) {}

// The message of a peer that is ahead may still be arriving in a box.
Channel::~Channel() {
  drop();
  auto lock = transport_.lock();
  const auto at_rest = [&] { return !lanes_.arriving(); };
  if (!transport_.changed().wait_for(lock, drop_time, at_rest)) {
    for (uint32_t r = 0; r < lanes_.size(); ++r)
      if (lanes_.arriving_from(r)) transport_.cut(ranks()[r]);
    transport_.changed().wait(lock, at_rest);
  }
  lanes_.retire();
}

// The condition for which the thread of a call waits: a chunk that all ranks have sent, or the end of the call.
class Channel::AwaitedCall final : public Awaited {
 public:
  AwaitedCall(Channel &channel, const Launch &launch, bool on_caller, CallUnderWay &call)
      : channel_(channel), launch_(launch), on_caller_(on_caller), call_(call) {}
  bool come() override {
    if (!attention() && (has_slept_ || ++looks_ % looks_per_read == 0) && call_.try_to_drive())
      call_.drive(concerned(), 0);
    if (!attention()) return false;
    channel_.lanes_.attention().store(false);  // cleared first, so that events during the checks are not missed
    channel_.look();
    const auto lock = channel_.transport_.lock();
    const bool come = channel_.lanes_.can_sum() || channel_.lanes_.done();
    // A lost peer is checked again until there is a verdict.
    if (come || channel_.failed_since_ != Clock::time_point()) channel_.lanes_.attention().store(true);
    return come;
  }
  bool given_up() override {
    return channel_.lanes_.round().hopeless(phase_of(launch_.round, launch_.number, Phase::read));
  }
  void sleep(uint32_t ms) override {
    has_slept_ = true;
    const bool failing = channel_.failed_since_ != Clock::time_point();
    if (call_.try_to_drive()) return call_.drive(concerned(), attention() && !failing ? 0 : ms);
    auto lock = channel_.transport_.lock();
    channel_.transport_.changed().wait_for(lock, std::chrono::milliseconds(ms), [&] {
      return !failing && channel_.lanes_.attention().load(std::memory_order_relaxed);
    });
  }
  bool misses(uint32_t world_rank) const override {
    const auto lock = channel_.transport_.lock();
    const uint32_t r = channel_.lanes_.lane_of(world_rank);
    return r < channel_.lanes_.size() && channel_.lanes_.misses(r);
  }
  // Data may be late because another rank is late. In that case a rank that has not come to the call at all is to
  // blame.
  bool lags(uint32_t world_rank) const override {
    if (!misses(world_rank)) return false;
    const auto lock = channel_.transport_.lock();
    bool all_met = true;
    for (uint32_t r = 0; r < channel_.lanes_.size(); ++r)
      all_met = all_met && (r == channel_.lanes_.rank() || channel_.lanes_.met(r));
    return all_met || !channel_.lanes_.met(channel_.lanes_.lane_of(world_rank));
  }
  std::span<const uint32_t> concerned() const override { return channel_.lanes_.ranks(); }
  bool misses_caller(uint32_t world_rank) const override {
    return channel_.misses_caller(world_rank, launch_, on_caller_);
  }
  Late late() const override { return Late::by_messages; }
  std::string text() const override { return launch_.fingerprint.text(launch_.number); }

 private:
  bool attention() const noexcept { return channel_.lanes_.attention().load(std::memory_order_acquire); }

  Channel &channel_;
  const Launch &launch_;
  bool on_caller_;
  CallUnderWay &call_;
  uint32_t looks_ = 0;
  bool has_slept_ = false;
};

// Used after a call was given up: waits until messages of the call no longer read or write the caller's memory.
class Channel::AwaitedNothingInFlight final : public Awaited {
 public:
  explicit AwaitedNothingInFlight(Channel &channel) : channel_(channel) {}
  bool come() override {
    const auto lock = channel_.transport_.lock();
    return channel_.lanes_.nothing_in_flight();
  }
  void sleep(uint32_t ms) override {
    auto lock = channel_.transport_.lock();
    channel_.transport_.changed().wait_for(lock, std::chrono::milliseconds(ms),
                                           [&] { return channel_.lanes_.nothing_in_flight(); });
  }
  bool misses(uint32_t world_rank) const override {
    const auto lock = channel_.transport_.lock();
    const uint32_t r = channel_.lanes_.lane_of(world_rank);
    return r < channel_.lanes_.size() && channel_.lanes_.sends_to(r);
  }
  std::string text() const override { return "the end of what was under way in a discarded step"; }

 private:
  Channel &channel_;
};

void Channel::begin(const Launch &launch) {
  Call::place_own(launch, lanes_.rank());
  failed_since_ = {};
  const auto lock = transport_.lock();
  lanes_.start(launch);
}

bool Channel::run(const Launch &launch, bool on_caller) {
  if (lanes_.round().skipped(launch.round)) {
    lanes_.round().break_at(phase_of(launch.round, launch.number, Phase::ready),
                            launch.fingerprint.text(launch.number));
    tell_end();
    return false;
  }
  CallUnderWay call(transport_, lanes_.prepare(launch));
  try {
    begin(launch);  // may throw after it has sent messages
    for (;;) {
      AwaitedCall awaited(*this, launch, on_caller, call);
      if (!seat_->watch.wait(awaited)) {
        call.stop_driving();  // below, the transport's thread ends what is under way
        give_up(launch);
        return false;
      }
      auto lock = transport_.lock();
      if (lanes_.can_sum()) {
        lock.unlock();
        sum_next();
        continue;
      }
      lanes_.choose_boxes();
      lock.unlock();
      lanes_.finish();
      lock = transport_.lock();
      lanes_.stop();
      lanes_.raise_phase(launch, Phase::read);
      return true;
    }
  } catch (...) {
    call.stop_driving();
    drop();
    throw;
  }
}

// `row` has the chunks of the other ranks. a + b and b + a have the same bits, so with two ranks neither needs a copy.
void Channel::add_chunk(std::byte *row, const ByteSpan &own, const ByteSpan &to, bool accumulate) const {
  const uint64_t count = own.bytes / sizeof(float), chunk_bytes = lanes_.chunk_bytes();
  const uint32_t size = lanes_.size(), rank = lanes_.rank();
  const auto add = [&](const std::byte *from) {
    device::kernels::add(to.data, FSDP_FLOAT32, from, FSDP_FLOAT32, count);
  };
  if (count == 0) return;
  if (accumulate) {
    for (uint32_t r = 0; r < size; ++r) add(r == rank ? own.data : row + r * chunk_bytes);
  } else if (size == 2 && to.data == own.data) {
    add(row + (1 - rank) * chunk_bytes);
  } else {
    device::kernels::copy_bytes(row + rank * chunk_bytes, own.data, own.bytes);
    add_in_rank_order(row, chunk_bytes, size, reinterpret_cast<float *>(to.data), count, false);
  }
}

// The chunk is summed without the mutex, so that the next chunks are sent during the sum.
void Channel::sum_next() {
  const uint64_t chunk = lanes_.next_sum();  // only this thread changes it
  bool accumulate = false;
  const ByteSpan own = lanes_.call().slice(lanes_.rank(), chunk), to = lanes_.call().sum(chunk, accumulate);
  add_chunk(lanes_.row(chunk), own, to, accumulate);
  const auto lock = transport_.lock();
  lanes_.end_sum();
}

// Peers are told first, because they must not go on either.
void Channel::give_up(const Launch &launch) {
  {
    const auto lock = transport_.lock();
    lanes_.stop();
  }
  lanes_.round().break_at(phase_of(launch.round, launch.number, Phase::read), launch.fingerprint.text(launch.number));
  tell_end();
  AwaitedNothingInFlight nothing_in_flight(*this);
  seat_->watch.wait(nothing_in_flight);
}

void Channel::tell_end() {
  const auto lock = transport_.lock();
  lanes_.tell_end();
}

// Called if the job is lost or this channel ends. Afterwards no message may use the caller's memory.
void Channel::drop() noexcept {
  auto lock = transport_.lock();
  lanes_.stop();
  if (lanes_.nothing_in_flight()) return;
  for (uint32_t r = 0; r < lanes_.size(); ++r)
    if (r != lanes_.rank()) transport_.cut(ranks()[r]);
  const auto ended = [&] { return lanes_.nothing_in_flight(); };
  if (transport_.traits().cut_always_completes)
    transport_.changed().wait(lock, ended);
  else
    transport_.changed().wait_for(lock, drop_time, ended);
}

bool Channel::misses_caller(uint32_t world_rank, const Launch &launch, bool on_caller) {
  const auto lock = transport_.lock();
  const uint32_t r = lanes_.lane_of(world_rank);
  if (r >= lanes_.size() || r == lanes_.rank() || lanes_.met(r)) return false;
  if (!transport_.connected(world_rank)) return on_caller && world_rank < ranks()[lanes_.rank()];
  return lanes_.misses_caller(r, launch, seat_->control.world_size());
}

// ---- calls that cannot go on ----

std::chrono::milliseconds Channel::verdict_time() const noexcept {
  if (!seat_->control.has_leader()) return lone_verdict_time;
  return std::chrono::milliseconds(seat_->pulse.limit_ms()) + decision_time;
}

// Throws if the call cannot go on.
void Channel::look() {
  const std::vector<uint32_t> &ranks = lanes_.ranks();
  const uint32_t size = lanes_.size();
  uint32_t different = size, failed = size;
  PeerLoss why;
  {
    const auto lock = transport_.lock();
    for (uint32_t r = 0; r < size; ++r) {
      if (r == lanes_.rank()) continue;
      if (lanes_.different(r)) different = std::min(different, r);
      if (transport_.loss_of(ranks[r]).text.empty() || !(lanes_.misses(r) || lanes_.sends_to(r))) continue;
      if (failed < size && transport_.loss_of(ranks[failed]).order < transport_.loss_of(ranks[r]).order) continue;
      why = transport_.loss_of(ranks[r]);
      failed = r;
    }
    if (failed < size && failed_since_ == Clock::time_point()) failed_since_ = Clock::now();
    if (failed == size) failed_since_ = {};
  }
  if (different < size) condemn_different(different);
  if (failed < size && Clock::now() - failed_since_ >= verdict_time())
    seat_->watch.condemn(
        FailureKind::died, ranks[failed],
        format_text("{}: rank {} cannot be reached: {}",
                    lanes_.call().launch().fingerprint.text(lanes_.call().launch().number), ranks[failed], why.text),
        why.origin, why.code);
}

// Both sides see the difference and report the same error.
void Channel::condemn_different(uint32_t r) {
  const Launch &launch = lanes_.call().launch();
  const std::vector<uint32_t> &ranks = lanes_.ranks();
  const uint32_t rank = lanes_.rank();
  Lanes::LaneHello theirs;
  {
    const auto lock = transport_.lock();
    theirs = lanes_.hello_of(r, launch.number);
  }
  const uint32_t first = std::min(r, rank), second = std::max(r, rank);
  const auto text = [&](uint32_t of) {
    const Fingerprint &fingerprint = of == rank ? launch.fingerprint : theirs.fingerprint;
    return format_text("rank {} called {}", ranks[of], fingerprint.text(launch.number));
  };
  std::string difference = format_text("{}, {}", text(first), text(second));
  if (theirs.fingerprint.hash == launch.fingerprint.hash)
    difference = format_text("rank {} has chunks of {} bytes, rank {} of {}: FSDP_NET_CHUNK_BYTES differs",
                             ranks[first], first == rank ? lanes_.chunk_bytes() : theirs.chunk_bytes, ranks[second],
                             second == rank ? lanes_.chunk_bytes() : theirs.chunk_bytes);
  seat_->watch.condemn(FailureKind::mismatch, ranks[second], difference);
}

}  // namespace fsdp::transport::messages
