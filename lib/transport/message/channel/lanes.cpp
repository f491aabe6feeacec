// SPDX-License-Identifier: Apache-2.0
#include "transport/message/channel/lanes.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/failure.h"

namespace fsdp::transport::messages {
namespace {

// The limit for data under way to one peer, because more would only wait inside the transport.
constexpr uint64_t in_flight_bytes = uint64_t{1} << 20;
constexpr uint64_t least_in_flight = 4;

using Clock = std::chrono::steady_clock;
constexpr uint64_t ask_period_ns = 100'000'000;
// The period for a peer that has already been asked often. In a large job thousands of ranks may wait for one late
// rank, and ask each other.
constexpr uint64_t patient_period_ns = 400'000'000;
constexpr uint32_t often = 20;
// Shorter than the time for which a cycle of waiting callers must last before it counts as a cycle.
constexpr uint64_t fresh_ns = 500'000'000;
// The factor by which all of these times are longer in a job of this many ranks, like the periods of polls.
uint64_t times_of(uint32_t ranks) noexcept { return static_cast<uint64_t>(slice_ms_of(ranks) / slice_ms); }

uint64_t clock_ns() noexcept { return static_cast<uint64_t>(Clock::now().time_since_epoch().count()); }

// For a message that has a place.
bool of_short_call(const Header &header) noexcept { return header.kind == Kind::call || header.stage == Stage::whole; }

void advance(Word &word, uint64_t to) noexcept {
  if (!word.reached(to)) word.raise(to);
}

}  // namespace

Lanes::Lanes(Transport &transport, std::vector<uint32_t> ranks, uint64_t key, uint64_t chunk_bytes,
             uint64_t short_bytes, device::Device *sums_on, const std::string &what)
    : transport_(transport),
      ranks_(std::move(ranks)),
      rank_(lane_of(transport.rank())),
      key_(key),
      chunk_bytes_(chunk_bytes),
      window_(net_window(static_cast<uint32_t>(ranks_.size()), chunk_bytes)),
      scratch_(sums_on ? sums_on->allocate_host(places_bytes() + net_boxes_bytes(size(), short_bytes), what.c_str())
                       : nullptr),
      boxes_(sums_on ? 0 : net_boxes_bytes(size(), short_bytes)),
      shorts_(rank_, size(), transport.traits().calls_carry_data ? short_bytes : 0,
              sums_on ? scratch_->data() + places_bytes() : boxes_.data()),
      states_(std::make_unique<RoundState[]>(ranks_.size())),
      round_(reinterpret_cast<std::byte *>(states_.get()), sizeof(RoundState), rank_, ranks_),
      lanes_(ranks_.size()) {
  if (rank_ >= size()) fail(FSDP_INTERNAL, "{}: rank {} is not among its ranks", what, transport.rank());
  for (Lane &lane : lanes_) lane.arrived.resize(window_);
  advance(states_[rank_].phase, first_phase(round_.number()));
  const auto lock = transport_.lock();
  for (const uint32_t r : ranks_) transport_.greet(r);
  transport_.add(key_, *this);  // the last step, because the receiver would remain registered after a later error
}

Lanes::~Lanes() {
  const auto lock = transport_.lock();
  transport_.remove(key_);
}

uint32_t Lanes::lane_of(uint32_t world_rank) const noexcept {
  return static_cast<uint32_t>(std::find(ranks_.begin(), ranks_.end(), world_rank) - ranks_.begin());
}

Header Lanes::header(Kind kind) const noexcept {
  Header header{};
  header.magic = header_magic;
  header.kind = kind;
  header.from = ranks_[rank_];
  header.key = key_;
  if (!active_) return header;
  header.round = call_.launch().round;
  header.number = call_.launch().number;
  header.call = call_.launch().fingerprint.hash;
  return header;
}

bool Lanes::is_active(const Header &header) const noexcept {
  return active_ && header.round == call_.launch().round && header.number == call_.launch().number;
}

void Lanes::tell(const Header &header, const void *payload, uint64_t bytes) {
  for (uint32_t i = 1; i < size(); ++i) transport_.send_control(ranks_[(rank_ + i) % size()], header, payload, bytes);
  if (size() > 1) transport_.wake();
}

EndState Lanes::end_state(uint32_t r) const noexcept {
  const RoundState &state = states_[r];
  return {state.ended.last.load(), state.ended.flags.load(), state.phase.value.load()};
}

// The first rank that discarded this round without an earlier end on another rank. If there is none, the rank that
// enqueued the fewest collectives in the round, or else this rank.
uint32_t Lanes::cause_of_end() const noexcept {
  uint32_t cause = rank_;
  for (uint32_t r = 0; r < size(); ++r) {
    const EndState state = end_state(r);
    if (state.flags >> 32 != round_.number()) continue;
    if (RoundState::discards(state.flags, r)) return r;
    const bool is_least = cause == rank_ || state.last < end_state(cause).last;
    if (state.flags & RoundState::enqueued_all && r != rank_ && is_least) cause = r;
  }
  return cause;
}

void Lanes::tell_end() {
  const uint32_t cause = cause_of_end();
  const Ended ended{end_state(rank_), cause, end_state(cause)};
  tell(header(Kind::ended), &ended, sizeof ended);
}

// ---- received messages ----

void Lanes::control(const Header &header, const void *payload, uint64_t bytes) {
  const uint32_t r = lane_of(header.from);
  if (r >= size() || r == rank_) return;
  lanes_[r].peer_is_ready =
      lanes_[r].peer_is_ready || header.kind != Kind::answer;  // answers also come without a channel
  if (header.kind == Kind::call && bytes == sizeof(Fingerprint)) take_hello(r, header, payload);
  if (header.kind == Kind::credit && is_active(header) && header.chunk <= call_.chunks())
    lanes_[r].reduce_allowed = std::max(lanes_[r].reduce_allowed, header.chunk + window_);
  if (header.kind == Kind::ask) take_question(r, header);
  if (header.kind == Kind::answer) take_answer(r, header);
  if (header.kind == Kind::ended && bytes == sizeof(Ended)) {
    Ended ended;
    std::memcpy(&ended, payload, sizeof ended);
    if (ended.cause < size() && ended.cause != rank_) take_end(static_cast<uint32_t>(ended.cause), ended.of_cause);
    take_end(r, ended.own);
  }
}

void Lanes::take_hello(uint32_t r, const Header &header, const void *payload) {
  if (header.number > max_collectives || header.round >> 32) return;
  LaneHello &hello = lanes_[r].hellos[header.number % hellos_kept];
  if (header.round < hello.round) return;  // belongs to a round that is over
  hello.round = header.round;
  hello.number = header.number;
  hello.chunk_bytes = header.chunk;
  std::memcpy(&hello.fingerprint, payload, sizeof hello.fingerprint);
  advance(states_[r].phase, phase_of(header.round, header.number, Phase::ready));
  if (is_active(header)) meet(lanes_[r], hello);
}

void Lanes::take_end(uint32_t r, const EndState &ended) noexcept {
  RoundState &state = states_[r];
  const uint64_t known = state.ended.flags.load(std::memory_order_relaxed);
  if (ended.flags >> 32 < known >> 32) return;
  advance(state.phase, ended.phase);
  if (ended.flags & RoundState::enqueued_all) state.ended.last.store(ended.last, std::memory_order_relaxed);
  state.ended.flags.store(RoundState::merge(known, ended.flags), std::memory_order_release);
  attention_.store(true, std::memory_order_release);
}

void Lanes::meet(Lane &lane, const LaneHello &hello) noexcept {
  const bool same = hello.fingerprint.hash == call_.launch().fingerprint.hash && hello.chunk_bytes == chunk_bytes_;
  lane.met = same;
  lane.different = !same;
  attention_.store(true, std::memory_order_release);
}

// Chunks of a call that was given up, or has not begun on this rank, are dropped. Peers send chunks of the running call
// only while this rank waits for them.
Place Lanes::place(const Header &header, uint64_t bytes) {
  const Place misfit{nullptr, true};
  const uint32_t r = lane_of(header.from);
  if (r >= size() || r == rank_) return misfit;
  if (of_short_call(header)) return shorts_.place(r, header, active_ ? &call_.launch() : nullptr);
  if (!is_active(header)) return {};
  if (header.call != call_.launch().fingerprint.hash || bytes != header.bytes) return misfit;
  if (header.stage == Stage::reduce) return place_of_sum(r, header);
  const uint64_t awaited = call_.received_from(r);
  if (header.stage != Stage::gather || header.chunk >= awaited || lanes_[r].gather_arrived >= awaited) return misfit;
  if (transport_.traits().in_order && header.chunk != lanes_[r].gather_arrived) return misfit;
  const ByteSpan extent = call_.incoming(r, header.chunk);
  if (bytes != extent.bytes) return misfit;
  ++receiving_;
  return {extent.data};
}

Place Lanes::place_of_sum(uint32_t r, const Header &header) noexcept {
  const Place misfit{nullptr, true};
  if (!call_.reduces() || header.chunk >= call_.chunks()) return misfit;
  if (header.chunk < summed_ || header.chunk >= summed_ + window_) return misfit;
  if (header.bytes != call_.slice(rank_, header.chunk).bytes) return misfit;
  if (lanes_[r].arrived[header.chunk % window_] > header.chunk) return misfit;
  ++receiving_;
  return {scratch_->data() + (header.chunk % window_ * size() + r) * chunk_bytes_};
}

// The message may come before this rank's call. If it is a call, its fingerprint is compared when this rank's call
// begins. If it is data, the fingerprint came with the peer's call.
void Lanes::take_whole(const Header &header) {
  const uint32_t r = lane_of(header.from);
  const auto message = shorts_.arrived(r);
  lanes_[r].peer_is_ready = true;
  if (header.kind == Kind::call) take_hello(r, header, message.data());
  attention_.store(true, std::memory_order_release);
}

void Lanes::lost(const Header &header) {
  if (of_short_call(header)) return shorts_.lost(lane_of(header.from));
  --receiving_;
}

void Lanes::arrived(const Header &header) {
  if (of_short_call(header)) return take_whole(header);
  --receiving_;
  if (!is_active(header)) return;
  Lane &lane = lanes_[lane_of(header.from)];
  if (header.stage == Stage::reduce)
    lane.arrived[header.chunk % window_] = header.chunk + 1;
  else
    ++lane.gather_arrived;
}

void Lanes::sent(Kind kind, uint32_t to) {
  if (kind != Kind::data) return;
  --lanes_[lane_of(to)].in_flight;
  --sending_;
}

// ---- the running call ----

void Lanes::start(const Launch &launch) {
  call_.start(launch, rank_, size(), chunk_bytes_);
  if (call_.reduces() && !scratch_) fail(FSDP_INTERNAL, "{} on a channel that does not sum", launch.fingerprint.name);
  active_ = true;
  summed_ = 0;
  for (Lane &lane : lanes_) {
    lane.met = lane.different = lane.short_sent = false;
    lane.reduce_sent = lane.gather_sent = lane.gather_arrived = 0;
    lane.reduce_allowed = window_;
    std::fill(lane.arrived.begin(), lane.arrived.end(), 0);
  }
  raise_phase(launch, Phase::ready);
  announce(launch);
  for (Lane &lane : lanes_) {
    const LaneHello &earlier = lane.hellos[launch.number % hellos_kept];
    if (earlier.round == launch.round && earlier.number == launch.number) meet(lane, earlier);
  }
  move_on();
  attention_.store(true, std::memory_order_release);
}

bool Lanes::prepare(const Launch &launch) noexcept {
  short_ = shorts_.fits(launch);
  if (short_) shorts_.pack(launch);
  return short_;
}

// A peer that has not created its channel yet drops data, so it first gets the call without data.
void Lanes::announce(const Launch &launch) {
  Header hello = header(Kind::call);
  hello.chunk = chunk_bytes_;
  hello.bytes = sizeof launch.fingerprint;
  for (uint32_t i = 1; i < size(); ++i) {
    const uint32_t r = (rank_ + i) % size();
    if (short_ && lanes_[r].peer_is_ready && !shorts_.packed().empty())
      post_whole(r, hello);
    else
      transport_.send_control(ranks_[r], hello, &launch.fingerprint, sizeof launch.fingerprint);
  }
  if (size() > 1) transport_.wake();
}

void Lanes::post_whole(uint32_t r, Header header) {
  const auto message = shorts_.packed();
  transport_.prepare(ranks_[r]);
  header.stage = Stage::whole;
  header.bytes = message.size();
  lanes_[r].short_sent = true;
  ++lanes_[r].in_flight;
  ++sending_;
  sent_bytes_.fetch_add(message.size() - sizeof(Fingerprint), std::memory_order_relaxed);
  transport_.send_data(ranks_[r], header, message.data());
}

void Lanes::raise_phase(const Launch &launch, Phase phase) noexcept {
  advance(states_[rank_].phase, phase_of(launch.round, launch.number, phase));
}

void Lanes::end_sum() {
  ++summed_;
  Header credit = header(Kind::credit);
  credit.chunk = summed_;
  // Credit is sent for several places at once, because a message costs as much as the sum of a small chunk.
  if (const uint64_t step = window_ / 4; summed_ % step == 0 && summed_ - step + window_ < call_.chunks())
    tell(credit, nullptr, 0);
  move_on();
  if (size() > 1) transport_.wake();
}

void Lanes::move_on() {
  answer_questions();
  if (active_) {
    for (uint32_t i = 1; i < size(); ++i) post((rank_ + i) % size());
    if (can_sum() || done()) attention_.store(true, std::memory_order_release);
  }
  // The thread is not woken for every message, because each wake-up would cost it a turn.
  if (active_ ? attention_.load(std::memory_order_relaxed) : nothing_in_flight()) transport_.changed().notify_all();
}

uint64_t Lanes::gather_allowed(uint32_t r) const noexcept {
  const uint64_t all = call_.sent_to(r);
  return call_.reduces() ? std::min(all, summed_) : all;
}

// Sums are sent first, because a peer that has the sum needs nothing more for that chunk.
void Lanes::post(uint32_t r) {
  Lane &lane = lanes_[r];
  if (short_) {
    if (lane.met && !lane.short_sent && !shorts_.packed().empty()) post_whole(r, header(Kind::data));
    return;
  }
  const uint64_t most = std::max(least_in_flight, in_flight_bytes / chunk_bytes_);
  while (lane.met && lane.in_flight < most) {
    if (lane.gather_sent < gather_allowed(r))
      post_chunk(r, Stage::gather, lane.gather_sent++);
    else if (call_.reduces() && lane.reduce_sent < std::min(call_.chunks(), lane.reduce_allowed))
      post_chunk(r, Stage::reduce, lane.reduce_sent++);
    else
      return;
  }
}

void Lanes::post_chunk(uint32_t r, Stage stage, uint64_t chunk) {
  const ByteSpan extent = stage == Stage::reduce ? call_.slice(r, chunk) : call_.outgoing(r, chunk);
  transport_.prepare(ranks_[r]);
  Header message = header(Kind::data);
  message.stage = stage;
  message.chunk = chunk;
  message.bytes = extent.bytes;
  ++lanes_[r].in_flight;
  ++sending_;
  sent_bytes_.fetch_add(extent.bytes, std::memory_order_relaxed);
  transport_.send_data(ranks_[r], message, extent.data);
}

bool Lanes::misses_data(uint32_t r) const noexcept {
  if (short_) return ShortCalls::given_by(r, call_.launch()) > 0 && !shorts_.has(r, call_.launch());
  const Lane &lane = lanes_[r];
  const bool reduced = !call_.reduces() || summed_ == call_.chunks() || lane.arrived[summed_ % window_] > summed_;
  return !reduced || lane.gather_arrived < call_.received_from(r);
}

bool Lanes::can_sum() const noexcept {
  if (!active_ || short_ || !call_.reduces() || summed_ == call_.chunks()) return false;
  for (uint32_t r = 0; r < size(); ++r)
    if (r != rank_ && lanes_[r].arrived[summed_ % window_] <= summed_) return false;
  return true;
}

bool Lanes::done() const noexcept {
  if (!nothing_in_flight() || (!short_ && call_.reduces() && summed_ < call_.chunks())) return false;
  for (uint32_t r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    const Lane &lane = lanes_[r];
    if (short_) {
      if (misses(r) || (!lane.short_sent && !shorts_.packed().empty())) return false;
      continue;
    }
    if (misses(r) || lane.gather_sent < call_.sent_to(r)) return false;
    if (call_.reduces() && lane.reduce_sent < call_.chunks()) return false;
  }
  return true;
}

// ---- questions between callers ----

// Asks which collectives the callers of peers have enqueued. A late stream of a peer tells nothing about the peer's
// caller. But a caller that waits elsewhere, and never makes the call, may be in a cycle of callers that wait for each
// other. So a rank that waits long asks again and again; an answer is valid for the time of its question. The answer
// takes the same way as the call, because the call may be lost and sent again long after the peer's leader has reported
// that the peer waits. If the peer has no such channel yet, its transport answers. A lower rank that has not connected
// to this rank has no channel with it. So the two are in no exchange, unless the lower rank is connecting, and then it
// is wrongly judged as missing. This makes no cycle of ranks that make the same call, because all edges without an
// answer lead from higher to lower ranks.
bool Lanes::misses_caller(uint32_t r, const Launch &launch, uint32_t world_size) {
  const uint64_t times = times_of(world_size);
  ask(r, times);
  if (clock_ns() - lanes_[r].answered_ns >= fresh_ns * times) return false;
  return !round_.called(r, phase_of(launch.round, launch.number, Phase::ready));
}

void Lanes::ask(uint32_t r, uint64_t times) {
  const uint64_t now = clock_ns();
  Lane &lane = lanes_[r];
  if (now - lane.asked_ns < times * (lane.asked < often ? ask_period_ns : patient_period_ns)) return;
  lane.asked = now - lane.asked_ns < times * fresh_ns ? lane.asked + 1 : 1;  // number of questions in this wait
  lane.asked_ns = now;
  Header question = header(Kind::ask);
  question.chunk = now;
  transport_.send_control(ranks_[r], question, nullptr, 0);
  transport_.wake();
}

// The question is answered later, because nothing may be sent inside a callback of the transport.
void Lanes::take_question(uint32_t r, const Header &header) noexcept {
  lanes_[r].question_ns = header.chunk;
  questions_ = true;
}

void Lanes::answer_questions() {
  if (!questions_) return;
  questions_ = false;
  for (uint32_t r = 0; r < size(); ++r) {
    if (!lanes_[r].question_ns) continue;
    Header answer = header(Kind::answer);
    answer.chunk = std::exchange(lanes_[r].question_ns, 0);
    answer.bytes = states_[rank_].ended.called.load(std::memory_order_acquire);
    transport_.send_control(ranks_[r], answer, nullptr, 0);
  }
}

void Lanes::take_answer(uint32_t r, const Header &header) noexcept {
  Lane &lane = lanes_[r];
  if (header.chunk > lane.asked_ns) return;  // the answer is for no question of this rank
  lane.answered_ns = std::max(lane.answered_ns, header.chunk);
  std::atomic<uint64_t> &called = states_[r].ended.called;
  called.store(std::max(called.load(std::memory_order_relaxed), header.bytes), std::memory_order_release);
}

}  // namespace fsdp::transport::messages
