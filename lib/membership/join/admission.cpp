// SPDX-License-Identifier: Apache-2.0
#include "membership/join/admission.h"

#include <cerrno>
#include <utility>

#include "membership/join/roster.h"
#include "membership/join/vigil.h"
#include "membership/wire/version.h"

namespace fsdp::membership {
namespace {

constexpr const char *refused_what = "a connection to the rendezvous";

}  // namespace

void refuse(FrameStream &stream, const message::Refusal &word) {
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
  for (const Candidate &newcomer : newcomers_) polls.push_back({newcomer.stream.socket().get(), POLLIN, 0});
}

void Admission::look(const Admit &admit) {
  for (Acceptor::AuthenticatedSocket &arrival : acceptor_.look())
    newcomers_.push_back({FrameStream(std::move(arrival.socket), message::longest, arrival.keys),
                          std::move(arrival.from), Clock::now() + Acceptor::message_time});
  const auto now = Clock::now();
  std::erase_if(newcomers_, [&](Candidate &newcomer) { return !hear(newcomer, admit) || now >= newcomer.deadline; });
}

std::string Admission::remark() const {
  const std::string &last = acceptor_.last_failure();
  return last.empty() ? last : "; it refused connections, the last from " + last;
}

// What is not expected ends the connection; a rank that was right tries again.
bool Admission::hear(Candidate &newcomer, const Admit &admit) {
  while (auto frame = newcomer.stream.receive()) {
    auto parsed = message::parse(frame->kind, frame->body);
    const auto *hello = std::get_if<message::Hello>(&parsed.message);
    if (hello && greet(newcomer, *hello)) continue;
    auto *join = std::get_if<message::Join>(&parsed.message);
    if (join && newcomer.introduced) admit(newcomer.stream, *join);
    return false;
  }
  if (newcomer.stream.code() == EBADMSG)
    turn_away(newcomer.stream, {FSDP_PEER_FAILED, -1,
                                changed_contact(format_text("rank {} (host {})", options_.rank, host_name()),
                                                newcomer.from, newcomer.stream.problem())
                                    .message});
  return newcomer.stream.open();
}

// What follows may be of another form if the libraries are not the same.
bool Admission::greet(Candidate &newcomer, const message::Hello &hello) {
  const std::string difference = compare_versions(hello.rank, hello.wire_version, hello.library, options_.rank);
  newcomer.introduced = difference.empty();
  if (!newcomer.introduced) turn_away(newcomer.stream, {FSDP_MISMATCH, -1, difference});
  return newcomer.introduced;
}

void Admission::turn_away(FrameStream &stream, const message::Refusal &word) {
  note_refusal(Endpoint::peer(stream.socket()).name(), word.text);
  refuse(stream, word);
}

void Admission::dismiss(const message::Refusal &word) {
  for (Candidate &newcomer : newcomers_) refuse(newcomer.stream, word);
}

}  // namespace fsdp::membership
