// SPDX-License-Identifier: Apache-2.0
#include "transport/message/channel/channel.h"

#include <algorithm>
#include <cstring>

namespace fsdp::transport::messages {

Channel::Channel(Transport &transport, std::shared_ptr<Seat> seat, std::vector<uint32_t> ranks, uint64_t key,
                 uint64_t chunk_bytes, device::Device *sums_on, const std::string &what)
    : transport_(transport),
      seat_(std::move(seat)),
      ranks_(std::move(ranks)),
      rank_(lane_of(transport.rank())),
      key_(key),
      chunk_bytes_(chunk_bytes),
      window_(net_window(static_cast<uint32_t>(ranks_.size()), chunk_bytes)),
      words_(std::make_unique<RoundWords[]>(ranks_.size())),
      round_(reinterpret_cast<std::byte *>(words_.get()), sizeof(RoundWords), rank_, ranks_),
      lanes_(ranks_.size()) {
  if (rank_ >= size()) fail(FSDP_INTERNAL, "{}: rank {} is not among its ranks", what, transport.rank());
  if (sums_on) scratch_ = sums_on->allocate_host(window_ * size() * chunk_bytes_, what.c_str());
  for (Lane &lane : lanes_) lane.arrived.resize(window_);
  raise(words_[rank_].phase, first_phase(round_.number()));
  const auto lock = transport_.lock();
  for (const uint32_t r : ranks_) transport_.greet(r);
  transport_.add(key_, *this);  // last: what throws after it would leave it there
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
  header.call = call_.launch().fingerprint.hash;
  return header;
}

bool Channel::is_active(const Header &header) const noexcept {
  return active_ && header.round == call_.launch().round && header.number == call_.launch().number;
}

void Channel::tell(const Header &header, const void *payload, uint64_t bytes) {
  for (uint32_t i = 1; i < size(); ++i) transport_.send_control(ranks_[(rank_ + i) % size()], header, payload, bytes);
  if (size() > 1) transport_.wake();
}

EndWords Channel::end_words(uint32_t r) const noexcept {
  const RoundWords &words = words_[r];
  return {words.ended.last.load(), words.ended.flags.load(), words.phase.value.load()};
}

// The first that discarded this round of its own accord, or else the one that enqueued least in it; this rank if there
// is none.
uint32_t Channel::cause_of_end() const noexcept {
  uint32_t cause = rank_;
  for (uint32_t r = 0; r < size(); ++r) {
    const EndWords words = end_words(r);
    if (words.flags >> 32 != round_.number()) continue;
    if (RoundWords::discards(words.flags, r)) return r;
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

void Channel::take_hello(uint32_t r, const Header &header, const void *payload) {
  if (header.number > most_collectives || header.round >> 32) return;
  Hello &hello = lanes_[r].hellos[header.number % hellos_kept];
  if (header.round < hello.round) return;  // of a round that is over
  hello.round = header.round;
  hello.number = header.number;
  hello.chunk_bytes = header.bytes;
  std::memcpy(&hello.fingerprint, payload, sizeof hello.fingerprint);
  raise(words_[r].phase, phase_of(header.round, header.number, Phase::ready));
  if (is_active(header)) meet(lanes_[r], hello);
}

void Channel::take_end(uint32_t r, const EndWords &ended) noexcept {
  RoundWords &words = words_[r];
  const uint64_t known = words.ended.flags.load(std::memory_order_relaxed);
  if (ended.flags >> 32 < known >> 32) return;
  raise(words.phase, ended.phase);
  if (ended.flags & RoundWords::quiet) words.ended.last.store(ended.last, std::memory_order_relaxed);
  words.ended.flags.store(RoundWords::merge(known, ended.flags), std::memory_order_release);
  attention_.store(true, std::memory_order_release);
}

void Channel::meet(Lane &lane, const Hello &hello) noexcept {
  const bool same = hello.fingerprint.hash == call_.launch().fingerprint.hash && hello.chunk_bytes == chunk_bytes_;
  lane.met = same;
  lane.different = !same;
  attention_.store(true, std::memory_order_release);
}

// Of a call that was given up, or has not begun here: dropped. Of the call that is run only what it waits for is sent.
Place Channel::place(const Header &header, uint64_t bytes) {
  const Place misfit{nullptr, true};
  const uint32_t r = lane_of(header.from);
  if (r >= size() || r == rank_) return misfit;
  if (!is_active(header)) return {};
  if (header.call != call_.launch().fingerprint.hash || header.chunk >= call_.chunks() || bytes != header.bytes)
    return misfit;
  if (header.stage == Stage::reduce) return place_of_sum(r, header);
  if (header.stage != Stage::gather || lanes_[r].gather_arrived >= call_.gathered_from(r)) return misfit;
  if (transport_.traits().in_order && header.chunk != lanes_[r].gather_arrived) return misfit;
  const ByteSpan extent = call_.slice(r, header.chunk);
  if (bytes != extent.bytes) return misfit;
  ++receiving_;
  return {extent.data};
}

Place Channel::place_of_sum(uint32_t r, const Header &header) noexcept {
  const Place misfit{nullptr, true};
  if (!call_.reduces() || header.chunk < summed_ || header.chunk >= summed_ + window_) return misfit;
  if (header.bytes != call_.slice(rank_, header.chunk).bytes) return misfit;
  if (lanes_[r].arrived[header.chunk % window_] > header.chunk) return misfit;
  ++receiving_;
  return {scratch_->data() + (header.chunk % window_ * size() + r) * chunk_bytes_};
}

void Channel::arrived(const Header &header) {
  --receiving_;
  if (!is_active(header)) return;
  Lane &lane = lanes_[lane_of(header.from)];
  if (header.stage == Stage::reduce)
    lane.arrived[header.chunk % window_] = header.chunk + 1;
  else
    ++lane.gather_arrived;
}

void Channel::sent(Kind kind, uint32_t to) {
  if (kind != Kind::data) return;
  --lanes_[lane_of(to)].in_flight;
  --sending_;
}

}  // namespace fsdp::transport::messages
