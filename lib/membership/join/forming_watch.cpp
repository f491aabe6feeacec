// SPDX-License-Identifier: Apache-2.0

#include "membership/join/forming_watch.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "membership/join/roster.h"

namespace fsdp::membership {

namespace {

// A peer wrote it.
bool reaches(const std::string &listens, bool near) {
  try {
    return !listens.empty() && (!parse_address(listens).loopback() || near);
  } catch (const Error &) {
    return false;
  }
}

}  // namespace

SharedFrame pass_on(const Frame &frame) { return share_frame(write_frame(frame.kind, frame.body)); }

Branch &Branches::add(FrameStream stream, const message::Join &join, bool other_host) {
  return all_.emplace_back(
      Branch{std::move(stream), join.rank, join.host, join.listens, other_host, true, {join.rank}});
}

Branch *Branches::of(uint32_t rank) {
  for (Branch &branch : all_)
    if (branch.has(rank)) return &branch;
  return nullptr;
}

// In turn, so that none gets more than another.
std::optional<message::Redirect> Branches::redirect(bool near) {
  std::vector<const Branch *> hosts;
  size_t taken = 0;
  for (const Branch &branch : all_) {
    if (!branch.other_host || !branch.watched) continue;
    ++taken;
    if (reaches(branch.listens, near)) hosts.push_back(&branch);
  }
  if (taken < join_degree || hosts.empty()) return {};
  const Branch &to = *hosts[turn_++ % hosts.size()];
  return message::Redirect{to.rank, to.host, to.listens};
}

void Branches::add_polls(std::vector<pollfd> &polls) const {
  for (const Branch &branch : all_) {
    const short events = static_cast<short>((branch.watched ? POLLIN : 0) | (branch.stream.sending() ? POLLOUT : 0));
    if (events && branch.stream.speaks()) polls.push_back({branch.stream.socket().get(), events, 0});
  }
}

void Branches::queue(const SharedFrame &frame) {
  for (Branch &branch : all_)
    if (branch.stream.speaks()) branch.stream.queue(frame);
}

bool Branches::flush() {
  bool gone = true;
  for (Branch &branch : all_)
    if (branch.stream.speaks() && !branch.stream.flush() && branch.stream.speaks()) gone = false;
  return gone;
}

namespace forming {

using Clock = std::chrono::steady_clock;

bool blames_others(const Error &error, uint32_t rank) {
  return error.status == FSDP_PEER_FAILED && error.rank != static_cast<int32_t>(rank);
}

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

void flush_soon(FrameStream &stream, Clock::time_point end) noexcept {
  try {
    while (!stream.flush() && stream.speaks() && Clock::now() < end) std::this_thread::sleep_for(1ms);
  } catch (...) {  // no memory for a text about it
  }
}

void give_up(FormingWatch &watch) noexcept {
  try {
    (void)watch.settle(Error(FSDP_INTERNAL, "it has ended"));
  } catch (...) {  // no memory: the end of the connections says that something is wrong
  }
}

}  // namespace forming

void Branches::tell_last(const message::Message &word) noexcept {
  try {
    queue(message::share(word));
    const auto end = std::chrono::steady_clock::now() + forming::farewell;
    for (Branch &branch : all_)
      if (branch.stream.speaks()) forming::flush_soon(branch.stream, end);
  } catch (...) {  // see the header
  }
}

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
  if (!forming::is_own(error, rank)) return {error.status, error.rank, error.message, static_cast<int32_t>(rank)};
  return {FSDP_PEER_FAILED, static_cast<int32_t>(rank),
          format_text("rank {} on {} gave up before the job had formed: {}", rank, host_name(), error.message),
          static_cast<int32_t>(rank)};
}

Error error_of(const message::Refusal &word, uint32_t world_size) {
  const bool known = word.status > FSDP_OK && word.status <= FSDP_INTERNAL;
  const bool in_world = word.rank >= 0 && word.rank < static_cast<int32_t>(world_size);
  return Error(known ? word.status : FSDP_PEER_FAILED, word.text, in_world ? word.rank : -1);
}

RootFormingWatch::RootFormingWatch(uint32_t size, Clock::time_point deadline, const Waiter &waiter, Admit admit)
    : waiter_(waiter), deadline_(deadline), admit_(std::move(admit)), parties_(size) {
  waiter_.set_wait_task(this);
}

RootFormingWatch::~RootFormingWatch() {
  waiter_.set_wait_task(nullptr);
  if (!finished_ && !end_) forming::give_up(*this);
}

void RootFormingWatch::take(uint32_t rank, std::string host_id, std::string host) {
  parties_[rank] = {true, std::move(host_id), std::move(host), {}};
}

void RootFormingWatch::set_card(uint32_t rank, std::vector<std::byte> card) {
  cards_ += parties_[rank].card ? 0 : 1;
  parties_[rank].card = std::move(card);
}

void RootFormingWatch::look() {
  if (end_) throw Error(*end_);
  const auto now = Clock::now();
  if (now - looked_ < forming::look_period) return;
  looked_ = now;
  hear_all();
  if (found_ != Clock::time_point() && now - found_ >= forming::grace) throw settle(conclude());
  if (now >= deadline_ + forming::lateness) throw settle(forming::late(deadline_));
}

void RootFormingWatch::hear_all() {
  std::vector<pollfd> polls;
  std::vector<Branch *> polled;
  for (Branch &branch : branches_.all()) {
    if (!branch.watched) continue;
    polls.push_back({branch.stream.socket().get(), POLLIN, 0});
    polled.push_back(&branch);
  }
  if (::poll(polls.data(), polls.size(), 0) > 0)
    for (size_t i = 0; i < polls.size(); ++i)
      if (polls[i].revents) hear(*polled[i]);
  if (found_ == Clock::time_point() && (report_ || !dead_.empty() || !lost_.empty())) found_ = Clock::now();
}

void RootFormingWatch::report(const Error &error) {
  if (!report_) report_ = error;
}

void RootFormingWatch::hear(Branch &branch) {
  while (auto frame = branch.stream.receive()) {
    if (!obey(branch, *frame)) {
      branch.watched = false;
      report(Error(
          FSDP_PEER_FAILED,
          format_text("rank {} on {} sent what is no message of this version of the library", branch.rank, branch.host),
          static_cast<int32_t>(branch.rank)));
    }
    if (!branch.watched) return;
  }
  if (!branch.stream.open()) check_end(branch);
}

bool RootFormingWatch::obey(Branch &branch, Frame &frame) {
  auto parsed = message::parse(frame.kind, frame.body);
  if (auto *join = std::get_if<message::Join>(&parsed.message)) {
    if (complete())  // the admission has ended
      branch.stream.queue(message::share(message::Refusal{
          FSDP_INVALID_ARGUMENT, -1, format_text("another process is rank {} already: all ranks have come", join->rank),
          static_cast<int32_t>(join->rank)}));
    else
      admit_(branch, *join);
    return true;
  }
  // Of ranks that were turned away something may be on its way still.
  if (auto *card = std::get_if<message::Card>(&parsed.message)) {
    if (!branch.has(card->rank)) return true;
    const bool first = !parties_[card->rank].card;
    if (first) set_card(card->rank, std::move(card->bytes));
    return first;
  }
  if (const auto *gone = std::get_if<message::Gone>(&parsed.message)) {
    if (branch.has(gone->rank)) dead_.add(gone->rank);
    return true;
  }
  if (const auto *word = std::get_if<message::Refusal>(&parsed.message)) {
    if (word->party >= 0 && !branch.has(static_cast<uint32_t>(word->party))) return true;
    if (word->party == static_cast<int32_t>(branch.rank)) branch.watched = false;
    report(membership::error_of(*word, static_cast<uint32_t>(parties_.size())));
    return true;
  }
  if (!std::holds_alternative<message::Formed>(parsed.message)) return false;
  branch.watched = false;
  return true;
}

// With its host all that are there are silent.
void RootFormingWatch::lose(const Branch &branch) {
  for (const uint32_t rank : branch.ranks)
    if (parties_[rank].host_id == parties_[branch.rank].host_id) lost_.add(rank);
}

void RootFormingWatch::check_end(Branch &branch) {
  branch.watched = false;
  const int code = branch.stream.code();
  if (code == EBADMSG)
    report(changed_contact(format_text("rank 0 (host {})", parties_[0].host),
                           format_text("rank {} (host {})", branch.rank, branch.host), branch.stream.problem()));
  else if (host_is_silent(code))
    lose(branch);
  else
    dead_.add(branch.rank);
}

// The dead first: a rank that has felt the end of a peer may blame one that ended because of another.
Error RootFormingWatch::conclude() const {
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

Error RootFormingWatch::settle(const Error &error) {
  if (end_) return forming::is_own(error, 0) ? error : *end_;
  if (finished_) return error;
  end_ = error;
  if (forming::blames_others(error, 0) && found_ == Clock::time_point()) {
    for (const auto end = Clock::now() + forming::doubt; found_ == Clock::time_point() && Clock::now() < end;
         hear_all())
      std::this_thread::sleep_for(forming::look_period);
    if (found_ != Clock::time_point()) {
      std::this_thread::sleep_for(forming::grace);
      hear_all();
      end_ = conclude();
    }
  }
  message::Refusal word = report_of(*end_, 0);
  word.party = -1;
  branches_.tell_last(word);
  return *end_;
}

void RootFormingWatch::finish() noexcept {
  finished_ = true;
  waiter_.set_wait_task(nullptr);
  branches_.tell_last(message::Formed{});
  branches_.clear();
}

}  // namespace fsdp::membership
