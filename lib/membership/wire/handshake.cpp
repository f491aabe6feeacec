// SPDX-License-Identifier: Apache-2.0
#include "membership/wire/handshake.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/failure.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {

Handshake::Handshake(Role role, std::string_view secret, const std::string &label)
    : role_(role), secret_(secret), label_(label.empty() ? std::string() : ": " + label) {
  if (role_ == Role::guest) {
    guest_nonce_ = make_nonce();
    expected_ = sizeof(wire::Challenge);
    return;
  }
  host_nonce_ = make_nonce();
  auto challenge = wire::make<wire::Challenge>();
  challenge.nonce = host_nonce_;
  say(challenge);
  expected_ = sizeof(wire::Answer);
}

template <class M>
void Handshake::say(const M &message) {
  std::memcpy(out_.data(), &message, sizeof message);
  out_bytes_ = sizeof message;
  sent_ = 0;
}

void Handshake::refuse(std::string problem) {
  state_ = IoState::failed;
  problem_ = std::move(problem);
}

template <class M>
bool Handshake::check_head(M &message) {
  std::memcpy(&message, in_.data(), sizeof message);
  if (std::memcmp(message.head.magic, wire::magic, sizeof wire::magic) != 0) {
    refuse("what came is not of libfsdp");
  } else if (message.head.version != wire::version) {
    refuse(format_text("the other end speaks version {} of the bootstrap, this one version {}", message.head.version,
                       wire::version));
  } else if (message.head.kind != M::kind) {
    refuse("a message of the handshake came out of turn");
  }
  return state_ != IoState::failed;
}

void Handshake::hear_challenge() {
  wire::Challenge challenge;
  if (!check_head(challenge)) return;
  challenged_ = true;
  host_nonce_ = challenge.nonce;
  auto answer = wire::make<wire::Answer>();
  answer.nonce = guest_nonce_;
  answer.digest = wire::guest_digest(secret_, host_nonce_, guest_nonce_, label_);
  say(answer);
  expected_ = sizeof(wire::Proof);
}

void Handshake::hear_answer() {
  wire::Answer answer;
  if (!check_head(answer)) return;
  guest_nonce_ = answer.nonce;
  if (!equal(answer.digest, wire::guest_digest(secret_, host_nonce_, guest_nonce_, label_)))
    return refuse("the peer has another job secret, repeats a recorded proof, or connected for another purpose");
  auto proof = wire::make<wire::Proof>();
  proof.digest = wire::host_digest(secret_, host_nonce_, guest_nonce_, label_);
  say(proof);
  expected_ = 0;
}

void Handshake::hear_proof() {
  wire::Proof proof;
  if (!check_head(proof)) return;
  if (!equal(proof.digest, wire::host_digest(secret_, host_nonce_, guest_nonce_, label_)))
    return refuse("the process that listens there has another job secret, or listens for another purpose");
  state_ = IoState::done;
}

// Returns false if something is left to send, or sending has failed.
bool Handshake::send(const Fd &socket) {
  while (sent_ < out_bytes_) {
    const ssize_t count = ::send(socket.get(), out_.data() + sent_, out_bytes_ - sent_, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    ended_ = count < 0 && errno != EAGAIN;
    if (ended_) refuse(format_text("the connection ended: {}", std::strerror(errno)));
    if (count <= 0) return false;
    sent_ += static_cast<size_t>(count);
  }
  return true;
}

// Returns true if the expected message is complete.
bool Handshake::receive(const Fd &socket) {
  while (got_ < expected_) {
    const ssize_t count = ::recv(socket.get(), in_.data() + got_, expected_ - got_, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return false;
    if (count <= 0) {
      ended_ = true;
      // An end that refuses the proof closes the connection, so the other end sees a wrong secret as a closed
      // connection.
      refuse(count == 0 || errno == ECONNRESET
                 ? "the other end hung up before it had proven the job secret; do both have the same?"
                 : format_text("the connection ended: {}", std::strerror(errno)));
      return false;
    }
    got_ += static_cast<size_t>(count);
    heard_ = true;
  }
  return true;
}

IoState Handshake::advance(const Fd &socket) {
  while (state_ == IoState::waiting) {
    if (!send(socket)) break;
    if (expected_ == 0) {
      state_ = IoState::done;
      break;
    }
    if (!receive(socket)) break;
    got_ = 0;
    if (role_ == Role::host) {
      hear_answer();
    } else if (!challenged_) {
      hear_challenge();
    } else {
      hear_proof();
    }
  }
  return state_;
}

StreamKeys Handshake::keys() const {
  const auto key_of = [this](const std::string &end) {
    return authenticate(secret_, "libfsdp frames of the " + end + label_, {host_nonce_, guest_nonce_});
  };
  const Digest guest = key_of("guest"), host = key_of("host");
  return role_ == Role::guest ? StreamKeys{guest, host} : StreamKeys{host, guest};
}

std::string prove(const Fd &socket, Role role, std::string_view secret, const std::string &label, const Limit &limit,
                  StreamKeys *keys, bool *ended) {
  Handshake handshake(role, secret, label);
  if (ended) *ended = true;
  for (;;) {
    switch (handshake.advance(socket)) {
      case IoState::done:
        if (keys) *keys = handshake.keys();
        return {};
      case IoState::failed:
        if (ended) *ended = handshake.ended();
        return handshake.problem();
      case IoState::waiting: break;
    }
    if (limit.over()) return "the other end has not proven the job secret in time";
    limit.waiter.poll();
    if (handshake.wants_to_send())
      await_room(socket, limit.look_ms);
    else
      await_readable(socket, limit.look_ms);
  }
}

}  // namespace fsdp::membership
