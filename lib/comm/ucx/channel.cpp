// SPDX-License-Identifier: Apache-2.0
#include "comm/ucx/channel.h"

#include <algorithm>
#include <cstring>

#include "comm/shm/message_launch.h"
#include "device/host/kernels.h"

namespace fsdp::comm::ucx {
namespace {

using Clock = std::chrono::steady_clock;
// What is under way to one peer; more would only wait inside UCX.
constexpr uint32_t most_in_flight = 4;
// Who notices deaths knows more than a broken connection says.
// How long a verdict may take that says more than that a connection ended. Leaders of nodes tell a death from a cut network, the
// latter after the heartbeat limit.
constexpr auto lone_verdict_time = std::chrono::milliseconds(500);
constexpr auto decision_time = std::chrono::milliseconds(1000);
constexpr auto drop_time = std::chrono::seconds(2);

void raise(Word &word, uint64_t to) noexcept {
  if (!word.reached(to)) word.raise(to);
}

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
  bool given_up() override { return channel_.round_.hopeless(phase_of(launch_.round, launch_.number, Part::read)); }
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
  bool needs_callers() const override { return on_caller_; }
  bool misses_caller(uint32_t world_rank) const override {
    return on_caller_ ? misses(world_rank) : channel_.misses_caller(world_rank, launch_);
  }
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

Channel::Channel(Transport &transport, std::shared_ptr<Seat> seat, std::vector<uint32_t> ranks, uint64_t key,
                 uint64_t chunk_bytes, bool sums, const std::string &what)
    : transport_(transport),
      seat_(std::move(seat)),
      ranks_(std::move(ranks)),
      rank_(lane_of(transport.rank())),
      key_(key),
      chunk_bytes_(chunk_bytes),
      words_(std::make_unique<RoundWords[]>(ranks_.size())),
      round_(reinterpret_cast<std::byte *>(words_.get()), sizeof(RoundWords), rank_, ranks_),
      lanes_(ranks_.size()) {
  if (rank_ >= size()) fail(FSDP_INTERNAL, "{}: rank {} is not among its ranks", what, transport.rank());
  if (sums) scratch_ = seat_->device.allocate(scratch_bytes(size(), chunk_bytes_), what.c_str());
  raise(words_[rank_].phase, first_phase(round_.number()));
  const auto lock = transport_.lock();
  transport_.add(key_, *this);
}

Channel::~Channel() {
  drop();
  const auto lock = transport_.lock();
  transport_.remove(key_);
}

uint32_t Channel::lane_of(uint32_t world_rank) const noexcept {
  return static_cast<uint32_t>(std::find(ranks_.begin(), ranks_.end(), world_rank) - ranks_.begin());
}

Header Channel::header(Kind kind) const noexcept {
  Header header{};
  header.magic = header_magic;
  header.kind = kind;
  header.from = ranks_[rank_];
  header.key = key_;
  if (!active_) return header;
  header.round = call_.launch().round;
  header.number = call_.launch().number;
  return header;
}

bool Channel::is_active(const Header &header) const noexcept {
  return active_ && header.round == call_.launch().round && header.number == call_.launch().number;
}

void Channel::tell(const Header &header, const void *payload, uint64_t bytes) {
  for (uint32_t i = 1; i < size(); ++i)
    transport_.send_control(ranks_[(rank_ + i) % size()], header, payload, bytes, *this);
  if (size() > 1) transport_.wake();
}

EndWords Channel::end_words(uint32_t r) const noexcept {
  const RoundWords &words = words_[r];
  return {words.ended.last.load(), words.ended.flags.load(), words.phase.value.load()};
}

// The first that abandoned this round, or else the one that enqueued least in it; this rank if there is none.
uint32_t Channel::cause_of_end() const noexcept {
  uint32_t cause = rank_;
  for (uint32_t r = 0; r < size(); ++r) {
    const EndWords words = end_words(r);
    if (words.flags >> 32 != round_.number()) continue;
    if (words.flags & RoundWords::abandoned) return r;
    const bool is_least = cause == rank_ || words.last < end_words(cause).last;
    if (words.flags & RoundWords::quiet && r != rank_ && is_least) cause = r;
  }
  return cause;
}

void Channel::tell_end() {
  const auto lock = transport_.lock();
  const uint32_t cause = cause_of_end();
  const Ended ended{end_words(rank_), cause, end_words(cause)};
  tell(header(Kind::ended), &ended, sizeof ended);
}

// ---- what comes ----

void Channel::control(const Header &header, const void *payload, uint64_t bytes) {
  const uint32_t r = lane_of(header.from);
  if (r >= size() || r == rank_) return;
  if (header.kind == Kind::call && bytes == sizeof(Fingerprint)) take_hello(r, header, payload);
  if (header.kind == Kind::credit && is_active(header) && header.chunk <= call_.chunks())
    lanes_[r].reduce_allowed = std::max(lanes_[r].reduce_allowed, header.chunk + window);
  if (header.kind == Kind::ask) take_question(r, header);
  if (header.kind == Kind::answer) take_answer(r, header);
  if (header.kind == Kind::ended && bytes == sizeof(Ended)) {
    Ended ended;
    std::memcpy(&ended, payload, sizeof ended);
    if (ended.cause < size() && ended.cause != rank_) take_end(static_cast<uint32_t>(ended.cause), ended.of_cause);
    take_end(r, ended.own);
  }
}

void Channel::take_hello(uint32_t r, const Header &header, const void *payload) {
  if (header.number > most_collectives || header.round >> 32) return;
  Hello &hello = lanes_[r].hellos[header.number % hellos_kept];
  if (header.round < hello.round) return;  // of a round that is over
  hello.round = header.round;
  hello.number = header.number;
  hello.chunk_bytes = header.bytes;
  std::memcpy(&hello.fingerprint, payload, sizeof hello.fingerprint);
  raise(words_[r].phase, phase_of(header.round, header.number, Part::ready));
  if (is_active(header)) meet(lanes_[r], hello);
}

void Channel::take_end(uint32_t r, const EndWords &ended) noexcept {
  RoundWords &words = words_[r];
  const uint64_t known = words.ended.flags.load(std::memory_order_relaxed);
  if (ended.flags >> 32 < known >> 32) return;
  raise(words.phase, ended.phase);
  if (ended.flags & RoundWords::quiet) words.ended.last.store(ended.last, std::memory_order_relaxed);
  // What others pass on may be older than what that rank itself said.
  const uint64_t kept = ended.flags >> 32 == known >> 32 ? known & 0xff : 0;
  words.ended.flags.store(ended.flags | kept, std::memory_order_release);
  attention_.store(true, std::memory_order_release);
}

void Channel::meet(Lane &lane, const Hello &hello) noexcept {
  const bool same = hello.fingerprint.hash == call_.launch().fingerprint.hash && hello.chunk_bytes == chunk_bytes_;
  lane.met = same;
  lane.different = !same;
  attention_.store(true, std::memory_order_release);
}

Place Channel::place(const Header &header, uint64_t bytes) {
  const uint32_t r = lane_of(header.from);
  if (r >= size() || r == rank_ || !is_active(header) || header.chunk >= call_.chunks() || bytes != header.bytes)
    return {};
  if (header.stage == Stage::reduce) {
    if (!call_.reduces() || header.chunk < summed_ || header.chunk >= summed_ + window) return {};
    if (bytes != call_.slice(rank_, header.chunk).bytes || lanes_[r].arrived[header.chunk % window] > header.chunk)
      return {};
    ++receiving_;
    return {scratch_->data() + (header.chunk % window * size() + r) * chunk_bytes_};
  }
  if (header.stage != Stage::gather || lanes_[r].gather_arrived >= call_.gathered_from(r)) return {};
  const Extent extent = call_.slice(r, header.chunk);
  if (bytes != extent.bytes) return {};
  ++receiving_;
  return {extent.data};
}

void Channel::arrived(const Header &header) {
  --receiving_;
  if (!is_active(header)) return;
  Lane &lane = lanes_[lane_of(header.from)];
  if (header.stage == Stage::reduce)
    lane.arrived[header.chunk % window] = header.chunk + 1;
  else
    ++lane.gather_arrived;
}

void Channel::sent(Kind kind, uint32_t to) {
  if (kind != Kind::data) return;
  --lanes_[lane_of(to)].in_flight;
  --sending_;
}

void Channel::move_on() {
  answer_questions();
  if (active_) {
    for (uint32_t i = 1; i < size(); ++i) post((rank_ + i) % size());
    if (can_sum() || done()) attention_.store(true, std::memory_order_release);
  }
  // Not for every message: each would cost the waiting thread a turn.
  if (active_ ? attention_.load(std::memory_order_relaxed) : quiet()) transport_.changed().notify_all();
}

// ---- what goes ----

uint64_t Channel::gather_allowed() const noexcept {
  return std::min(call_.gathered_from(rank_), call_.reduces() ? summed_ : call_.chunks());
}

// Sums first: a peer that has them needs nothing more for that chunk.
void Channel::post(uint32_t r) {
  Lane &lane = lanes_[r];
  while (lane.met && lane.in_flight < most_in_flight) {
    if (lane.gather_sent < gather_allowed())
      post_chunk(r, Stage::gather, lane.gather_sent++);
    else if (call_.reduces() && lane.reduce_sent < std::min(call_.chunks(), lane.reduce_allowed))
      post_chunk(r, Stage::reduce, lane.reduce_sent++);
    else
      return;
  }
}

void Channel::post_chunk(uint32_t r, Stage stage, uint64_t chunk) {
  const Extent extent = call_.slice(stage == Stage::reduce ? r : rank_, chunk);
  Header message = header(Kind::data);
  message.stage = stage;
  message.chunk = chunk;
  message.bytes = extent.bytes;
  ++lanes_[r].in_flight;
  ++sending_;
  sent_bytes_.fetch_add(extent.bytes, std::memory_order_relaxed);
  transport_.send_data(ranks_[r], message, extent.data, *this);
}

bool Channel::misses_data(uint32_t r) const noexcept {
  const Lane &lane = lanes_[r];
  const bool reduced = !call_.reduces() || summed_ == call_.chunks() || lane.arrived[summed_ % window] > summed_;
  return !reduced || lane.gather_arrived < call_.gathered_from(r);
}

bool Channel::can_sum() const noexcept {
  if (!active_ || !call_.reduces() || summed_ == call_.chunks()) return false;
  for (uint32_t r = 0; r < size(); ++r)
    if (r != rank_ && lanes_[r].arrived[summed_ % window] <= summed_) return false;
  return true;
}

bool Channel::done() const noexcept {
  if (!quiet() || (call_.reduces() && summed_ < call_.chunks())) return false;
  for (uint32_t r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    const Lane &lane = lanes_[r];
    if (misses(r) || lane.gather_sent < call_.gathered_from(rank_)) return false;
    if (call_.reduces() && lane.reduce_sent < call_.chunks()) return false;
  }
  return true;
}

// ---- the thread of the call ----

void Channel::begin(const Launch &launch) {
  const auto lock = transport_.lock();
  call_.start(launch, rank_, size(), chunk_bytes_);
  if (call_.reduces() && !scratch_) fail(FSDP_INTERNAL, "{} on a channel that does not sum", launch.fingerprint.name);
  active_ = true;
  summed_ = 0;
  failed_since_ = {};
  for (Lane &lane : lanes_) {
    lane.met = lane.different = false;
    lane.reduce_sent = lane.gather_sent = lane.gather_arrived = 0;
    lane.reduce_allowed = window;
    std::fill(std::begin(lane.arrived), std::end(lane.arrived), 0);
  }
  raise(words_[rank_].phase, phase_of(launch.round, launch.number, Part::ready));
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
    round_.break_at(phase_of(launch.round, launch.number, Part::ready), launch.fingerprint.text(launch.number));
    tell_end();
    return false;
  }
  begin(launch);
  try {
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
      raise(words_[rank_].phase, phase_of(launch.round, launch.number, Part::read));
      return true;
    }
  } catch (...) {
    drop();
    throw;
  }
}

// row: what the others sent. a + b and b + a are the same bits: of two ranks neither sum needs a copy.
void Channel::add_chunk(std::byte *row, const Extent &own, const Extent &to, bool accumulate) const {
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
  const Extent own = call_.slice(rank_, chunk), to = call_.sum(chunk, accumulate);
  add_chunk(scratch_->data() + chunk % window * size() * chunk_bytes_, own, to, accumulate);
  const auto lock = transport_.lock();
  ++summed_;
  Header credit = header(Kind::credit);
  credit.chunk = summed_;
  if (summed_ + window <= call_.chunks()) tell(credit, nullptr, 0);
  move_on();
  if (size() > 1) transport_.wake();
}

// Peers are told first, so that they do not go on either.
void Channel::give_up(const Launch &launch) {
  {
    const auto lock = transport_.lock();
    active_ = false;
  }
  round_.break_at(phase_of(launch.round, launch.number, Part::read), launch.fingerprint.text(launch.number));
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
  transport_.changed().wait_for(lock, drop_time, [&] { return quiet(); });
}

std::chrono::milliseconds Channel::verdict_time() const noexcept {
  if (!seat_->control.has_leader()) return lone_verdict_time;
  return std::chrono::milliseconds(seat_->pulse.limit_ms()) + decision_time;
}

// Throws if the call cannot go on.
void Channel::look() {
  uint32_t different = size(), failed = size();
  std::string why;
  {
    const auto lock = transport_.lock();
    for (uint32_t r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      if (lanes_[r].different) different = std::min(different, r);
      if (transport_.failure_of(ranks_[r]).empty() || !(misses(r) || lanes_[r].in_flight)) continue;
      if (failed < size() && transport_.failure_order(ranks_[failed]) < transport_.failure_order(ranks_[r])) continue;
      why = transport_.failure_of(ranks_[r]);
      failed = r;
    }
    if (failed < size() && failed_since_ == Clock::time_point()) failed_since_ = Clock::now();
    if (failed == size()) failed_since_ = {};
  }
  if (different < size()) condemn_different(different);
  if (failed < size() && Clock::now() - failed_since_ >= verdict_time())
    seat_->watch.condemn(Verdict::died, ranks_[failed],
                         format_text("{}: rank {} cannot be reached: {}",
                                     call_.launch().fingerprint.text(call_.launch().number), ranks_[failed], why));
}

// Both sides see the difference and say the same.
void Channel::condemn_different(uint32_t r) {
  const Launch &launch = call_.launch();
  Hello theirs;
  {
    const auto lock = transport_.lock();
    theirs = lanes_[r].hellos[launch.number % hellos_kept];
  }
  const uint32_t first = std::min(r, rank_), second = std::max(r, rank_);
  const auto text = [&](uint32_t of) {
    const Fingerprint &fingerprint = of == rank_ ? launch.fingerprint : theirs.fingerprint;
    return format_text("rank {} called {}", ranks_[of], fingerprint.text(launch.number));
  };
  std::string difference = format_text("{}, {}", text(first), text(second));
  if (theirs.fingerprint.hash == launch.fingerprint.hash)
    difference = format_text("rank {} has chunks of {} bytes, rank {} of {}: FSDP_UCX_CHUNK_BYTES differs",
                             ranks_[first], first == rank_ ? chunk_bytes_ : theirs.chunk_bytes, ranks_[second],
                             second == rank_ ? chunk_bytes_ : theirs.chunk_bytes);
  seat_->watch.condemn(Verdict::mismatch, ranks_[second], difference);
}

}  // namespace fsdp::comm::ucx
