// SPDX-License-Identifier: Apache-2.0
#include "membership/join/admission.h"

#include <cerrno>
#include <utility>

#include "membership/job.h"
#include "membership/join/forming_watch.h"
#include "membership/join/roster.h"

namespace fsdp::membership {
namespace {

constexpr const char *refused_what = "a connection to the rendezvous";

}  // namespace

void say_last(FrameStream &stream, const message::Message &word) {
  stream.queue(message::share(word));
  stream.flush();
}

Admission::Admission(const WorldOptions &options, std::span<const Fd> listeners, const std::string &label, Fd events)
    : options_(options),
      refusals_(refused_what, options.log),
      known_refusals_(refused_what, options.log),
      acceptor_(options.secret, label, &refusals_, Acceptor::usual_places(), std::move(events)) {
  for (const Fd &listener : listeners) acceptor_.listen(listener);
}

void Admission::add_polls(std::vector<pollfd> &polls) const {
  acceptor_.add_polls(polls);
  for (const Candidate &candidate : candidates_) polls.push_back({candidate.stream.socket().get(), POLLIN, 0});
}

void Admission::look(const Admit &admit) {
  for (Acceptor::AuthenticatedSocket &arrival : acceptor_.look())
    candidates_.push_back({FrameStream(std::move(arrival.socket), message::longest, arrival.keys),
                           std::move(arrival.from), Clock::now() + Acceptor::message_time});
  const auto now = Clock::now();
  std::erase_if(candidates_,
                [&](Candidate &candidate) { return !hear(candidate, admit) || now >= candidate.deadline; });
}

std::string Admission::remark() const {
  const std::string &last = acceptor_.last_failure();
  return last.empty() ? last : "; it refused connections, the last from " + last;
}

// An unexpected message ends the connection. If it came from a rank of this job, that rank tries again.
bool Admission::hear(Candidate &candidate, const Admit &admit) {
  while (auto frame = candidate.stream.receive()) {
    auto parsed = message::parse(frame->kind, frame->body);
    const auto *hello = std::get_if<message::Hello>(&parsed.message);
    if (hello && greet(candidate, *hello)) continue;
    auto *join = std::get_if<message::Join>(&parsed.message);
    if (join && candidate.introduced) admit(candidate.stream, *join);
    return false;
  }
  if (candidate.stream.code() == EBADMSG)
    turn_away(candidate.stream, {FSDP_PEER_FAILED, -1,
                                 changed_contact(format_text("rank {} (host {})", options_.rank, host_name()),
                                                 candidate.from, candidate.stream.problem())
                                     .message});
  return candidate.stream.open();
}

// In another version of the library the later messages may have another form.
bool Admission::greet(Candidate &candidate, const message::Hello &hello) {
  const std::string difference = compare_versions(hello.rank, hello.wire_version, hello.library, options_.rank);
  candidate.introduced = difference.empty();
  if (!candidate.introduced) turn_away(candidate.stream, {FSDP_MISMATCH, -1, difference});
  return candidate.introduced;
}

void Admission::turn_away(FrameStream &stream, const message::Refused &word) {
  note_refusal(Endpoint::peer(stream.socket()).name(), word.text);
  say_last(stream, word);
}

void Admission::dismiss(const message::Refused &refused) {
  for (Candidate &candidate : candidates_) say_last(candidate.stream, refused);
}

void Admission::dismiss(const Verdict &verdict) {
  const Error error = error_of(verdict.accusation, RankSet::most);
  const message::Refused refused{error.status, error.rank, error.message};
  for (Candidate &candidate : candidates_) {
    if (candidate.introduced)
      say_last(candidate.stream, verdict);
    else
      say_last(candidate.stream, refused);
  }
}

}  // namespace fsdp::membership
