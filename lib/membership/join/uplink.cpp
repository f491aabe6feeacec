// SPDX-License-Identifier: Apache-2.0
#include "membership/join/uplink.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "base/failure.h"

namespace fsdp::membership {

Uplink::Uplink(const WorldOptions &options, FrameStream up, Above above, std::string address,
               Clock::time_point deadline, const Waiter &waiter)
    : options_(options),
      rank_(options.rank),
      up_(std::move(up)),
      above_(std::move(above)),
      address_(std::move(address)),
      by_host_(address_.empty()),
      waiter_(waiter),
      deadline_(deadline) {
  waiter_.set_wait_task(this);
}

Uplink::~Uplink() {
  waiter_.set_wait_task(nullptr);
  if (!finished_ && !end_) forming::give_up(*this);
}

void Uplink::open(std::span<const Fd> listeners, const std::string &label) {
  if (started()) return;  // the job is complete, and the listeners may end before this object does
  admission_ = std::make_unique<Admission>(options_, listeners, label);
}

void Uplink::leave() noexcept {
  finished_ = true;
  waiter_.set_wait_task(nullptr);
}

std::string Uplink::own_text() const { return format_text("rank {} (host {})", rank_, host_name()); }
std::string Uplink::above_text() const {
  return above_.host.empty() ? format_text("rank {} (rendezvous {})", above_.rank, options_.rendezvous)
                             : format_text("rank {} (host {})", above_.rank, above_.host);
}

// -- hearing --

void Uplink::serve() {
  std::vector<pollfd> polls{{up_.socket().get(), static_cast<short>(POLLIN | (up_.sending() ? POLLOUT : 0)), 0}};
  below_.add_polls(polls);
  if (admission_) admission_->add_polls(polls);
  ::poll(polls.data(), polls.size(), slice_ms_of(options_.size));
  hear();
  if (end_) throw Error(*end_);
}

void Uplink::look() {
  if (end_) throw Error(*end_);
  const auto now = Clock::now();
  if (now - looked_ < forming::look_period) return;
  looked_ = now;
  hear();
  if (end_) throw Error(*end_);
  if (started() && now >= deadline_ + forming::lateness) throw settle(forming::late(deadline_));
}

void Uplink::hear() {
  if (end_ || formed_ || again_ || redirect_) return;  // the end of the upward connection no longer means a death
  for (Branch &branch : below_.all())
    if (branch.watched) hear_below(branch);
  if (admission_) admission_->look([this](FrameStream &stream, message::Join &join) { admit(stream, join); });
  if (up_.speaks()) up_.flush();
  hear_above();
  below_.flush();
}

void Uplink::end(const Error &error) { end(error, accusation_of(error, rank_)); }

void Uplink::end(const Error &error, const Accusation &verdict) {
  end_ = error;
  if (admission_) admission_->dismiss(Verdict{verdict});
  admission_.reset();
  below_.tell_last(Verdict{verdict});
}

// -- from above --

void Uplink::hear_above() {
  while (!formed_ && !end_) {
    const auto frame = up_.receive();
    if (!frame) break;
    obey(*frame);
    if (again_ || redirect_) return;
  }
  if (!formed_ && !end_ && !up_.open()) check_above();
}

void Uplink::obey(const Frame &frame) {
  auto parsed = message::parse(frame.kind, frame.body);
  if (const auto *refused = std::get_if<message::Refused>(&parsed.message)) return obey(*refused, frame);
  const auto *verdict = std::get_if<Verdict>(&parsed.message);
  if (verdict && is_believable(verdict->accusation, options_.size))
    return end(error_of(verdict->accusation, rank_), verdict->accusation);
  if (const auto *admitted = std::get_if<message::Admitted>(&parsed.message)) {
    above_ = {admitted->rank, admitted->host};
    if (address_.empty()) address_ = admitted->address;
    admitted_ = true;
    return;
  }
  if (const auto *elsewhere = std::get_if<message::Redirect>(&parsed.message); elsewhere && !admitted_) {
    redirect_ = *elsewhere;
    return;
  }
  if (std::holds_alternative<message::Formed>(parsed.message) && started()) return void(formed_ = true);
  auto *entries = std::get_if<message::Entries>(&parsed.message);
  const auto *start = std::get_if<message::Start>(&parsed.message);
  const bool fits = entries
                        ? !started() && entries->size() > 0 && roster_.size() + entries->size() <= options_.size &&
                              roster_.add(std::move(*entries))
                        : start && !started() && start->world_size == options_.size && roster_.size() == options_.size;
  if (!fits)
    return end(Error(FSDP_SYSTEM,
                     format_text("rendezvous '{}': what rank {} says is wrong: {}", options_.rendezvous, above_.rank,
                                 parsed.problem.empty() ? "a message out of turn" : parsed.problem),
                     static_cast<int32_t>(above_.rank)));
  if (start) {
    session_ = start->session;
    admission_.reset();
  }
  below_.queue(pass_on(frame));
}

void Uplink::obey(const message::Refused &refused, const Frame &frame) {
  if (refused.to >= 0 && refused.to != static_cast<int32_t>(rank_)) {
    const auto to = static_cast<uint32_t>(refused.to);
    if (Branch *branch = below_.of(to)) {
      branch->stream.queue(pass_on(frame));
      std::erase(branch->ranks, to);  // the right process may still join
      branch->watched = branch->watched && branch->rank != to;
    }
    return;
  }
  if (refused.status == FSDP_OK) return void(again_ = refused.text);
  const bool known =
      refused.status > FSDP_OK && refused.status <= FSDP_INTERNAL;  // another version may have written it
  const bool in_job = refused.rank >= 0 && refused.rank < static_cast<int32_t>(options_.size);
  end(Error(known ? refused.status : FSDP_PEER_FAILED, refused.text, in_job ? refused.rank : -1));
}

void Uplink::check_above() {
  if (by_host_ && !admitted_) return void(again_ = "the rank of this host that had come first has ended");
  if (up_.code() == EBADMSG) {
    end(changed_contact(own_text(), above_text(), up_.problem()));
    return report_last(*end_);  // otherwise the rank above would report the end of the connection as a death
  }
  if (host_is_silent(up_.code())) {
    const Accusation lost = lost_contact(own_text(), above_text());
    return end(error_of(lost, rank_), lost);
  }
  const auto rank = static_cast<int32_t>(above_.rank);
  if (started())
    return end(
        Error(FSDP_PEER_FAILED, format_text("rank {} on {} died before the job had formed", rank, above_.host), rank));
  end(Error(FSDP_PEER_FAILED,
            format_text("rendezvous '{}': rank {} ended before the job had formed ({})", options_.rendezvous, rank,
                        up_.problem()),
            rank));
}

// -- from below --

void Uplink::admit(FrameStream &stream, message::Join &join) {
  const bool other_host = Endpoint::local(stream.socket()).family() != AF_UNIX;
  if (join.rank == rank_ || below_.of(join.rank))
    return admission_->turn_away(
        stream,
        {FSDP_INVALID_ARGUMENT, -1, format_text("another process is rank {} already, on {}", join.rank, host_name())});
  if (const auto elsewhere = other_host ? below_.redirect(Endpoint::peer(stream.socket()).loopback()) : std::nullopt) {
    stream.queue(message::share(*elsewhere));
    stream.flush();
    return;
  }
  if (other_host) notice_silence(stream.socket(), options_.heartbeat_timeout_ms);
  Branch &branch = below_.add(std::move(stream), join, other_host);
  branch.stream.queue(message::share(message::Admitted{rank_, host_name(), other_host ? std::string() : address_}));
  join.listens.clear();  // so that the ranks above redirect no ranks to that address
  up_.queue(message::share(join));
}

void Uplink::hear_below(Branch &branch) {
  while (branch.watched) {
    const auto frame = branch.stream.receive();
    if (!frame) break;
    pass_up(branch, *frame);
  }
  if (branch.watched && !branch.stream.open()) check_below(branch);
}

// Is the message about a rank of this branch? Messages of a process that was refused here may still be in transit when
// another process has joined as its rank.
bool Uplink::is_of(const Branch &branch, const message::Parsed &parsed) {
  if (const auto *card = std::get_if<message::Card>(&parsed.message)) return branch.has(card->rank);
  const auto *said = std::get_if<Report>(&parsed.message);
  if (!said) return true;
  if (said->last_of >= 0 && !branch.has(static_cast<uint32_t>(said->last_of))) return false;
  return said->accusation.kind != FailureKind::died || branch.has(static_cast<uint32_t>(said->accusation.rank));
}

void Uplink::pass_up(Branch &branch, const Frame &frame) {
  const auto parsed = message::parse(frame.kind, frame.body);
  if (std::holds_alternative<message::Formed>(parsed.message)) return void(branch.watched = false);
  const auto *said = std::get_if<Report>(&parsed.message);
  if (!parsed.problem.empty() || (said && !is_believable(said->accusation, options_.size))) return refuse(branch);
  if (!is_of(branch, parsed)) return;
  if (said) branch.watched = said->last_of != static_cast<int32_t>(branch.rank);
  if (const auto *join = std::get_if<message::Join>(&parsed.message)) {
    if (join->rank == rank_ || below_.of(join->rank))
      return branch.stream.queue(message::share(
          message::Refused{FSDP_INVALID_ARGUMENT, -1,
                           format_text("another process is rank {} already, below rank {}", join->rank, rank_),
                           static_cast<int32_t>(join->rank)}));
    branch.ranks.push_back(join->rank);
  }
  up_.queue(pass_on(frame));
}

void Uplink::refuse(Branch &branch) {
  branch.watched = false;
  up_.queue(message::share(Report{no_message(branch.rank, branch.host)}));
}

void Uplink::check_below(Branch &branch) {
  branch.watched = false;
  const int code = branch.stream.code();
  const std::string text = format_text("rank {} (host {})", branch.rank, branch.host);
  Accusation found = accuse_death(branch.rank);
  if (code == EBADMSG)
    found = accusation_of(changed_contact(own_text(), text, branch.stream.problem()), rank_);
  else if (host_is_silent(code))
    found = lost_contact(own_text(), text);
  up_.queue(message::share(Report{found}));
}

// -- the end --

Error Uplink::settle(const Error &error) {
  if (!end_ && !finished_) hear();
  if (end_ && !is_own(error, rank_)) return *end_;
  if (formed_ || finished_) return error;
  // The late rank may itself wait for another rank, and may be about to report that rank.
  if (error.status == FSDP_TIMEOUT) await_verdict(forming::doubt);
  if (!end_ && !formed_) report_last(error);
  // This rank passes the verdict to the ranks below.
  if (forming::blames_others(error, rank_) || !below_.all().empty()) await_verdict(forming::answer_time);
  if (!end_) end(error);
  return is_own(error, rank_) ? error : *end_;
}

void Uplink::await_verdict(Clock::duration time) {
  for (const auto until = Clock::now() + time; !end_ && !formed_ && Clock::now() < until; hear())
    std::this_thread::sleep_for(forming::look_period);
}

void Uplink::report_last(const Error &error) {
  tell_above(Report{accusation_of(error, rank_), static_cast<int32_t>(rank_)});
}

void Uplink::tell_above(const message::Message &word) noexcept {
  try {
    if (!up_.speaks()) return;
    up_.queue(message::share(word));
    forming::flush_soon(up_, Clock::now() + forming::farewell);
  } catch (...) {  // no memory: the end of the connection tells that something is wrong
  }
}

void Uplink::finish() noexcept {
  finished_ = true;
  waiter_.set_wait_task(nullptr);
  if (up_.open()) tell_above(message::Formed{});
  below_.tell_last(message::Formed{});
  up_ = FrameStream();
  below_.clear();
}

}  // namespace fsdp::membership
