// SPDX-License-Identifier: Apache-2.0

#include "membership/join/forming_watch.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "membership/join/roster.h"

namespace fsdp::membership {

namespace {

// Can the next rank reach this address? A peer sent the address, so it may be wrong.
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

// The branches take turns, so that all get about the same number of ranks.
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

Error late(Clock::time_point deadline) {
  const auto over = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - deadline).count();
  return Error(
      FSDP_TIMEOUT,
      format_text("all ranks came to the rendezvous, but not all have met since: {} ms beyond the timeout", over));
}

void flush_soon(FrameStream &stream, Clock::time_point end) noexcept {
  try {
    while (!stream.flush() && stream.speaks() && Clock::now() < end) std::this_thread::sleep_for(1ms);
  } catch (...) {  // no memory for the text of the problem
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
  } catch (...) {  // no memory: see tell_last() in the header
  }
}

bool host_is_silent(int code) noexcept { return code == ETIMEDOUT || code == EHOSTUNREACH || code == ENETUNREACH; }

Accusation lost_contact(const std::string &one, const std::string &other) {
  Accusation accusation;
  accusation.kind = FailureKind::cut;
  accusation.text.set(format_text(
      "no contact between {} and {} before the job had formed: the network between them is cut, or a host is down", one,
      other));
  return accusation;
}

Accusation no_message(uint32_t rank, const std::string &host) {
  return accuse_rank(FailureKind::failed, rank,
                     format_text("rank {} on {} sent what is no message of this version of the library", rank, host));
}

Error changed_contact(const std::string &one, const std::string &other, const std::string &problem) {
  return Error(FSDP_PEER_FAILED, format_text("{} cannot hear {} before the job has formed: {}", one, other, problem));
}

Accusation accusation_of(const Error &error, uint32_t rank) { return accuse_for(error, rank, host_name()); }

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
  if (const auto error = verdict()) throw settle(*error);
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
}

void RootFormingWatch::report(const Accusation &accusation) { coordinator_.hear(accusation, steady_ms()); }

void RootFormingWatch::hear(Branch &branch) {
  while (auto frame = branch.stream.receive()) {
    if (!obey(branch, *frame)) {
      branch.watched = false;
      report(no_message(branch.rank, branch.host));
    }
    if (!branch.watched) return;
  }
  if (!branch.stream.open()) check_end(branch);
}

bool RootFormingWatch::obey(Branch &branch, Frame &frame) {
  auto parsed = message::parse(frame.kind, frame.body);
  if (auto *join = std::get_if<message::Join>(&parsed.message)) {
    if (complete())  // the admission has ended
      branch.stream.queue(message::share(message::Refused{
          FSDP_INVALID_ARGUMENT, -1, format_text("another process is rank {} already: all ranks have come", join->rank),
          static_cast<int32_t>(join->rank)}));
    else
      admit_(branch, *join);
    return true;
  }
  // Messages of refused ranks may still be in transit; they are ignored.
  if (auto *card = std::get_if<message::Card>(&parsed.message)) {
    if (!branch.has(card->rank)) return true;
    const bool first = !parties_[card->rank].card;
    if (first) set_card(card->rank, std::move(card->bytes));
    return first;
  }
  if (const auto *said = std::get_if<Report>(&parsed.message)) return obey(branch, *said);
  if (!std::holds_alternative<message::Formed>(parsed.message)) return false;
  branch.watched = false;
  return true;
}

bool RootFormingWatch::obey(Branch &branch, const Report &said) {
  if (!is_believable(said.accusation, static_cast<uint32_t>(parties_.size()))) return false;
  if (said.last_of >= 0 && !branch.has(static_cast<uint32_t>(said.last_of))) return true;
  if (said.last_of == static_cast<int32_t>(branch.rank)) branch.watched = false;
  const auto blamed = static_cast<uint32_t>(said.accusation.rank);
  if (said.accusation.kind != FailureKind::died)
    report(said.accusation);
  else if (branch.has(blamed))  // the rank above the dead one has seen the dead one's connection end
    report(accuse_death(blamed));
  return true;
}

// If a host is silent, all of its ranks are lost.
void RootFormingWatch::report_loss(const Branch &branch) {
  std::vector<uint32_t> lost;
  for (const uint32_t rank : branch.ranks)
    if (parties_[rank].host_id == parties_[branch.rank].host_id) lost.push_back(rank);
  std::ranges::sort(lost);
  report(lost_contact(own_text(), format_text("{} (host {})", rank_list(lost), branch.host)));
}

std::string RootFormingWatch::own_text() const { return format_text("rank 0 (host {})", parties_[0].host); }

void RootFormingWatch::check_end(Branch &branch) {
  branch.watched = false;
  const int code = branch.stream.code();
  if (code == EBADMSG)
    report(accusation_of(changed_contact(own_text(), format_text("rank {} (host {})", branch.rank, branch.host),
                                         branch.stream.problem()),
                         0));
  else if (host_is_silent(code))
    report_loss(branch);
  else
    report(accuse_death(branch.rank));
}

std::optional<Error> RootFormingWatch::verdict() const {
  auto accusation = coordinator_.decide(steady_ms());
  if (!accusation) return {};
  if (accusation->kind == FailureKind::died) {
    const std::vector<uint32_t> dead = accusation->ranks.list();
    accusation->text.set(
        dead.size() == 1 ? format_text("rank {} on {} died before the job had formed", dead[0], parties_[dead[0]].host)
                         : rank_list(dead) + " died before the job had formed");
  }
  return error_of(*accusation, 0);
}

Error RootFormingWatch::settle(const Error &error) {
  if (end_) return is_own(error, 0) ? error : *end_;
  if (finished_) return error;
  end_ = error;
  if (forming::blames_others(error, 0)) {
    const auto end = Clock::now() + forming::doubt;
    while (coordinator_.open() ? !verdict() : Clock::now() < end) {
      std::this_thread::sleep_for(forming::look_period);
      hear_all();
    }
    end_ = verdict().value_or(*end_);
  }
  branches_.tell_last(Verdict{accusation_of(*end_, 0)});
  return *end_;
}

void RootFormingWatch::finish() noexcept {
  finished_ = true;
  waiter_.set_wait_task(nullptr);
  branches_.tell_last(message::Formed{});
  branches_.clear();
}

}  // namespace fsdp::membership
