// SPDX-License-Identifier: Apache-2.0
#include "membership/join/entrance.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "membership/join/roster.h"
#include "membership/join/vigil.h"
#include "membership/wire/packet.h"
#include "membership/wire/version.h"

namespace fsdp::membership {
namespace {

using namespace std::chrono_literals;

// Who has not joined costs no more than this; the rest waits in the kernel's queue. Where all places are taken, who has
// proven nothing for a while makes room, so that silent strangers do not keep the ranks out.
constexpr size_t most_at_entrance = 256;
constexpr auto time_at_entrance = 10s;
constexpr uint32_t most_notes = 32;

// A unix socket shows whose process is at its other end.
bool of_another_user(const Fd &socket) {
  return Endpoint::local(socket).family() == AF_UNIX && peer_user(socket) != ::geteuid();
}

}  // namespace

void refuse(FrameStream &stream, const message::Refusal &word) {
  stream.queue(message::share(word));
  stream.flush();
}

void Entrance::add_polls(std::vector<pollfd> &polls) {
  if (has_room()) listeners_.add_polls(polls);
  for (const Guest &guest : guests_) polls.push_back({guest.stream.socket().get(), POLLIN, 0});
}

void Entrance::look(const Admit &admit) {
  const auto now = Clock::now();
  std::erase_if(guests_, [&](Guest &guest) { return !hear(guest, admit) || now - guest.since >= time_at_entrance; });
  accept(admit);
}

bool Entrance::has_room() { return guests_.size() < most_at_entrance || drop_stranger(); }

bool Entrance::drop_stranger() {
  const auto oldest = std::find_if(guests_.begin(), guests_.end(), [](const Guest &guest) { return !guest.proven(); });
  if (oldest == guests_.end() || Clock::now() - oldest->since < least_time) return false;
  guests_.erase(oldest);
  return true;
}

void Entrance::accept(const Admit &admit) {
  for (size_t taken = 0; taken < most_at_entrance && has_room(); ++taken) {
    Fd socket = listeners_.accept();
    if (!socket) {
      if (!listeners_.pause().over()) drop_stranger();
      return;
    }
    if (of_another_user(socket)) continue;
    guests_.push_back({FrameStream(std::move(socket), message::longest), Handshake(Role::host, options_.secret, label_),
                       Clock::now()});
    if (!hear(guests_.back(), admit)) guests_.pop_back();  // sends the challenge
  }
}

bool Entrance::prove(Guest &guest) {
  if (!guest.proven() && guest.proof.advance(guest.stream.socket()) != Handshake::State::proven) return false;
  if (guest.welcomed) return true;
  guest.welcomed = true;
  guest.stream.guard(guest.proof.keys());
  guest.since = Clock::now();  // a slow handshake must not cost the time to join
  return true;
}

// What is not expected ends the connection; a rank that was right tries again.
bool Entrance::hear(Guest &guest, const Admit &admit) {
  if (!prove(guest)) {
    if (guest.proof.state() == Handshake::State::waiting) return true;
    note("somebody who came to the rendezvous", guest.proof.problem(), stranger_notes_);
    if (guest.proof.of_another_version()) remark_ = "; of somebody who came: " + guest.proof.problem();
    return false;
  }
  while (auto frame = guest.stream.receive()) {
    auto parsed = message::parse(frame->kind, frame->body);
    const auto *hello = std::get_if<message::Hello>(&parsed.message);
    if (hello && greet(guest, *hello)) continue;
    auto *join = std::get_if<message::Join>(&parsed.message);
    if (join && guest.introduced) admit(guest.stream, *join);
    return false;
  }
  if (guest.stream.code() == EBADMSG)
    turn_away(guest.stream, {FSDP_PEER_FAILED, -1,
                             changed_contact(format_text("rank {} (host {})", options_.rank, host_name()),
                                             "who connects", guest.stream.problem())
                                 .message});
  return guest.stream.open();
}

// What follows may be of another form if the libraries are not the same.
bool Entrance::greet(Guest &guest, const message::Hello &hello) {
  const std::string difference = compare_versions(hello.rank, hello.wire_version, hello.library, options_.rank);
  guest.introduced = difference.empty();
  if (!guest.introduced) turn_away(guest.stream, {FSDP_MISMATCH, -1, difference});
  return guest.introduced;
}

// Who knocks without end fills no log, and leaves room for those that belong here.
void Entrance::note(const std::string &who, const std::string &why, uint32_t &notes) {
  if (options_.log && notes++ < most_notes) options_.log(FSDP_LOG_WARNING, format_text("refused {}: {}", who, why));
}

void Entrance::note_refusal(const std::string &text) { note("a process that knows the secret", text, notes_); }

void Entrance::turn_away(FrameStream &stream, const message::Refusal &word) {
  note_refusal(word.text);
  refuse(stream, word);
}

void Entrance::dismiss(const message::Refusal &word) {
  for (Guest &guest : guests_)
    if (guest.welcomed) refuse(guest.stream, word);
}

}  // namespace fsdp::membership
