// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap/vigil.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "comm/bootstrap/roster.h"

namespace fsdp::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto look_period = 5ms;
constexpr auto grace = 60ms;         // for what ends at the same time
constexpr auto doubt = 300ms;        // for the end of a peer to be seen by rank 0, when another rank has felt it
constexpr auto answer_time = 600ms;  // for rank 0's word after a report
constexpr auto farewell = 200ms;
constexpr auto lateness = 700ms;  // beyond the deadline: waits with a limit of their own name who is late

// A peer is to blame, or the link to it, but perhaps only because of another one that rank 0 knows of.
bool blames_others(const Error &error, uint32_t rank) {
  return error.status == FSDP_PEER_FAILED && error.rank != static_cast<int32_t>(rank);
}

// Nothing that peers did: what this rank reports whatever they say.
bool is_own(const Error &error, uint32_t rank) {
  if (error.rank >= 0) return error.rank == static_cast<int32_t>(rank);
  return error.status != FSDP_PEER_FAILED && error.status != FSDP_TIMEOUT;
}

Error late(Clock::time_point deadline) {
  const auto over = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - deadline).count();
  return Error(
      FSDP_TIMEOUT,
      format_text("all ranks came to the rendezvous, but not all have met since: {} ms beyond the timeout", over));
}

// What was queued goes out, if the other end takes it soon.
void flush_soon(FrameStream &stream, Clock::time_point end) noexcept {
  try {
    while (!stream.flush() && stream.speaks() && Clock::now() < end) std::this_thread::sleep_for(1ms);
  } catch (...) {  // no memory for a text about it
  }
}

void give_up(Vigil &vigil) noexcept {
  try {
    (void)vigil.settle(Error(FSDP_INTERNAL, "it has ended"));
  } catch (...) {  // no memory: the end of the connections says that something is wrong
  }
}

}  // namespace

bool host_is_silent(int code) noexcept { return code == ETIMEDOUT || code == EHOSTUNREACH || code == ENETUNREACH; }

Error lost_contact(const std::string &one, const std::string &other) {
  return Error(FSDP_PEER_FAILED,
               format_text("no contact between {} and {} before the job had formed: the network between "
                           "them is cut, or a host is down",
                           one, other));
}

Error changed_contact(const std::string &one, const std::string &other, const std::string &problem) {
  return Error(FSDP_PEER_FAILED, format_text("{} cannot hear {} before the job has formed: {}", one, other, problem));
}

message::Refusal report_of(const Error &error, uint32_t rank) {
  if (!is_own(error, rank)) return {error.status, error.rank, error.message};
  return {FSDP_PEER_FAILED, static_cast<int32_t>(rank),
          format_text("rank {} on {} gave up before the job had formed: {}", rank, host_name(), error.message)};
}

Error error_of(const message::Refusal &word, uint32_t world_size) {
  const bool known = word.status > FSDP_OK && word.status <= FSDP_INTERNAL;
  const bool in_world = word.rank >= 0 && word.rank < static_cast<int32_t>(world_size);
  return Error(known ? word.status : FSDP_PEER_FAILED, word.text, in_world ? word.rank : -1);
}

// -- rank 0 --

HostVigil::HostVigil(uint32_t size, Clock::time_point deadline, const Waiter &waiter)
    : waiter_(waiter), deadline_(deadline), parties_(size) {
  waiter_.set_duty(this);
}

HostVigil::~HostVigil() {
  waiter_.set_duty(nullptr);
  if (!finished_ && !end_) give_up(*this);
}

void HostVigil::look() {
  if (end_) throw Error(*end_);
  const auto now = Clock::now();
  if (now - looked_ < look_period) return;
  looked_ = now;
  hear_all();
  if (found_ != Clock::time_point() && now - found_ >= grace) throw settle(conclude());
  if (now >= deadline_ + lateness) throw settle(late(deadline_));
}

void HostVigil::hear_all() {
  std::vector<pollfd> polls;
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < parties_.size(); ++r) {
    if (!parties_[r].stream || !parties_[r].watched) continue;
    polls.push_back({parties_[r].stream.socket().get(), POLLIN, 0});
    ranks.push_back(r);
  }
  if (::poll(polls.data(), polls.size(), 0) > 0)
    for (size_t i = 0; i < polls.size(); ++i)
      if (polls[i].revents) hear(ranks[i]);
  if (found_ == Clock::time_point() && (report_ || !dead_.empty() || !lost_.empty())) found_ = Clock::now();
}

void HostVigil::hear(uint32_t rank) {
  Party &party = parties_[rank];
  while (auto frame = party.stream.receive()) {
    auto parsed = message::parse(frame->kind, frame->body);
    if (auto *card = std::get_if<message::Card>(&parsed.message); card && !party.card) {
      party.card = std::move(card->bytes);
      continue;
    }
    party.watched = false;
    if (std::holds_alternative<message::Formed>(parsed.message)) return;
    const auto *word = std::get_if<message::Refusal>(&parsed.message);
    if (report_) return;
    report_ = word ? comm::error_of(*word, static_cast<uint32_t>(parties_.size()))
                   : Error(FSDP_PEER_FAILED,
                           format_text("rank {} on {} sent what is no message of this version of the library", rank,
                                       party.host),
                           static_cast<int32_t>(rank));
    return;
  }
  if (!party.stream.open()) check_end(rank);
}

void HostVigil::check_end(uint32_t rank) {
  parties_[rank].watched = false;
  if (parties_[rank].stream.code() == EBADMSG) {
    if (report_) return;
    report_ =
        changed_contact(format_text("rank 0 (host {})", parties_[0].host),
                        format_text("rank {} (host {})", rank, parties_[rank].host), parties_[rank].stream.problem());
    return;
  }
  (host_is_silent(parties_[rank].stream.code()) ? lost_ : dead_).add(rank);
}

// The dead first: who has felt the end of a peer may blame one that ended because of another.
Error HostVigil::conclude() const {
  const std::vector<uint32_t> dead = dead_.list();
  if (dead.size() == 1)
    return Error(FSDP_PEER_FAILED,
                 format_text("rank {} on {} died before the job had formed", dead[0], parties_[dead[0]].host),
                 static_cast<int32_t>(dead[0]));
  if (!dead.empty())
    return Error(FSDP_PEER_FAILED, rank_list(dead) + " died before the job had formed", static_cast<int32_t>(dead[0]));
  if (report_) return *report_;
  const std::vector<uint32_t> lost = lost_.list();
  return lost_contact(format_text("rank 0 (host {})", parties_[0].host),
                      format_text("{} (host {})", rank_list(lost), parties_[lost.front()].host));
}

Error HostVigil::settle(const Error &error) {
  if (end_) return is_own(error, 0) ? error : *end_;
  if (finished_) return error;
  end_ = error;
  if (blames_others(error, 0) && found_ == Clock::time_point()) {
    for (const auto end = Clock::now() + doubt; found_ == Clock::time_point() && Clock::now() < end; hear_all())
      std::this_thread::sleep_for(look_period);
    if (found_ != Clock::time_point()) {
      std::this_thread::sleep_for(grace);
      hear_all();
      end_ = conclude();
    }
  }
  tell(report_of(*end_, 0));
  return *end_;
}

void HostVigil::tell(const message::Message &word) noexcept {
  try {
    const auto bytes = message::share(word);
    for (Party &party : parties_)
      if (party.stream && party.stream.speaks()) party.stream.queue(bytes);
    const auto end = Clock::now() + farewell;
    for (Party &party : parties_)
      if (party.stream && party.stream.speaks()) flush_soon(party.stream, end);
  } catch (...) {  // no memory: the end of the connections says that something is wrong
  }
}

void HostVigil::finish() noexcept {
  finished_ = true;
  waiter_.set_duty(nullptr);
  tell(message::Formed{});
  for (Party &party : parties_) party.stream = FrameStream();
}

// -- all others --

GuestVigil::GuestVigil(uint32_t rank, FrameStream stream, std::string zero_host, Clock::time_point deadline,
                       const Waiter &waiter)
    : rank_(rank), stream_(std::move(stream)), zero_host_(std::move(zero_host)), waiter_(waiter), deadline_(deadline) {
  waiter_.set_duty(this);
}

GuestVigil::~GuestVigil() {
  waiter_.set_duty(nullptr);
  if (!finished_ && !end_) give_up(*this);
}

void GuestVigil::look() {
  if (end_) throw Error(*end_);
  const auto now = Clock::now();
  if (now - looked_ < look_period) return;
  looked_ = now;
  hear();
  if (end_) throw Error(*end_);
  if (now >= deadline_ + lateness) throw settle(late(deadline_));
}

void GuestVigil::hear() {
  while (!formed_ && !end_) {
    const auto frame = stream_.receive();
    if (!frame) break;
    const auto parsed = message::parse(frame->kind, frame->body);
    if (const auto *word = std::get_if<message::Refusal>(&parsed.message))
      end_ = comm::error_of(*word, RankSet::most);
    else if (std::holds_alternative<message::Formed>(parsed.message))
      formed_ = true;
    else
      end_ = Error(FSDP_PEER_FAILED, "rank 0 sent what is no message of this version of the library", 0);
  }
  if (formed_ || end_ || stream_.open()) return;
  if (stream_.code() == EBADMSG) {
    end_ = changed_contact(format_text("rank {} (host {})", rank_, host_name()),
                           format_text("rank 0 (host {})", zero_host_), stream_.problem());
    return tell(report_of(*end_, rank_));  // else it would take the end of the connection for a death
  }
  if (host_is_silent(stream_.code()))
    end_ =
        lost_contact(format_text("rank {} (host {})", rank_, host_name()), format_text("rank 0 (host {})", zero_host_));
  else
    end_ = Error(FSDP_PEER_FAILED, format_text("rank 0 on {} died before the job had formed", zero_host_), 0);
}

Error GuestVigil::settle(const Error &error) {
  if (!end_ && !finished_) hear();
  if (end_ && !is_own(error, rank_)) return *end_;
  if (formed_ || finished_) return error;
  // Whoever is late may wait for another one, and be about to say so.
  if (error.status == FSDP_TIMEOUT) await_word(doubt);
  if (!end_ && !formed_) tell(report_of(error, rank_));
  if (blames_others(error, rank_)) await_word(answer_time);
  if (!end_) end_ = error;
  return is_own(error, rank_) ? error : *end_;
}

void GuestVigil::await_word(Clock::duration time) {
  for (const auto end = Clock::now() + time; !end_ && !formed_ && Clock::now() < end; hear())
    std::this_thread::sleep_for(look_period);
}

void GuestVigil::tell(const message::Message &word) noexcept {
  try {
    stream_.queue(message::share(word));
    flush_soon(stream_, Clock::now() + farewell);
  } catch (...) {  // no memory: the end of the connection says that something is wrong
  }
}

void GuestVigil::finish() noexcept {
  finished_ = true;
  waiter_.set_duty(nullptr);
  if (stream_.open()) tell(message::Formed{});
  stream_ = FrameStream();
}

}  // namespace fsdp::comm
