// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp/introduction.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace fsdp::comm::tcp {
namespace {

constexpr uint32_t greeting_magic = 0x66736768, greeting_version = 1, native_order = 0x01020304;

}  // namespace

std::string JobNames::label(uint32_t to) const { return format_text("libfsdp messages to rank {} of {}", to, name); }

Introduction::Introduction(const JobNames &job, uint32_t to, const Endpoint &place, Clock::time_point deadline)
    : job_(job), role_(Role::guest), peer_(to), place_(place), deadline_(deadline) {
  socket_ = begin_connecting(place, code_);
  connecting_ = true;
}

Introduction::Introduction(const JobNames &job, Fd socket, Clock::time_point deadline)
    : job_(job), role_(Role::host), deadline_(deadline), socket_(std::move(socket)) {
  const Endpoint other = Endpoint::peer(socket_);
  from_ = other.length() ? other.text() : "somebody who has gone";
}

void Introduction::hang_up() noexcept {
  if (socket_) ::shutdown(socket_.get(), SHUT_RDWR);
  socket_.reset();
}

Introduction::State Introduction::fail_with(std::string problem, int code, bool final) {
  problem_ = std::move(problem);
  code_ = code;
  final_ = final;
  hang_up();
  return State::failed;
}

bool Introduction::wants_room() const noexcept {
  return connecting_ || (handshake_ && handshake_->wants_to_send()) || gone_ < out_bytes_;
}

Introduction::State Introduction::advance() {
  if (!problem_.empty()) return State::failed;
  State state = connecting_ ? connect() : State::done;
  if (state == State::done) state = prove();
  if (state == State::done) state = greet();
  if (state == State::waiting && Clock::now() >= deadline_) return fail_with(why_late(), ETIMEDOUT, false);
  return state;
}

std::string Introduction::why_late() const {
  const bool silent = role_ == Role::host && !(handshake_ && handshake_->has_heard());
  return silent ? "it has said nothing" : "the other end has not answered in time";
}

Introduction::State Introduction::connect() {
  const int code = socket_ && (code_ == 0 || code_ == EINPROGRESS) ? connecting_result(socket_, place_) : code_;
  if (code == EINPROGRESS) return State::waiting;
  if (code) return fail_with(format_text("{}: {}", place_.text(), std::strerror(code)), code, false);
  code_ = 0;
  connecting_ = false;
  return State::done;
}

Introduction::State Introduction::prove() {
  if (!handshake_) handshake_.emplace(role_, job_.secret, job_.label(role_ == Role::guest ? peer_ : job_.rank));
  switch (handshake_->advance(socket_)) {
    case Handshake::State::waiting: return State::waiting;
    case Handshake::State::failed: return fail_with(handshake_->problem(), EPROTO, !handshake_->ended());
    case Handshake::State::proven: break;
  }
  return State::done;
}

Greeting Introduction::own_greeting() const noexcept {
  return {greeting_magic, greeting_version, native_order, job_.world_size, job_.rank, peer_, job_.protection.checksum};
}

// Who connects speaks first.
Introduction::State Introduction::greet() {
  if (role_ == Role::guest && !write_greeting()) return problem_.empty() ? State::waiting : State::failed;
  if (!read_greeting()) return problem_.empty() ? State::waiting : State::failed;
  Greeting said;
  std::memcpy(&said, in_.data(), sizeof said);
  if (role_ == Role::host) peer_ = said.from;
  const Greeting mine = own_greeting();
  const bool fits = said.magic == mine.magic && said.version == mine.version && said.byte_order == mine.byte_order &&
                    said.world_size == mine.world_size && said.to == job_.rank && said.from == peer_;
  if (!fits || peer_ >= job_.world_size || (role_ == Role::host && peer_ >= job_.rank))
    return fail_with("the other end is a rank of another job, or of another version of this library", EPROTO, true);
  if (said.checksum != mine.checksum) return fail_with("the other end has another FSDP_NET_CHECKSUM", EPROTO, true);
  if (role_ == Role::host && !write_greeting()) return problem_.empty() ? State::waiting : State::failed;
  return State::done;
}

bool Introduction::write_greeting() {
  if (out_bytes_ == 0) {
    const Greeting mine = own_greeting();
    std::memcpy(out_.data(), &mine, sizeof mine);
    out_bytes_ = sizeof mine;
  }
  while (gone_ < out_bytes_) {
    const ssize_t count = ::send(socket_.get(), out_.data() + gone_, out_bytes_ - gone_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno != EAGAIN) fail_with(std::strerror(errno), errno, false);
    if (count <= 0) return false;
    gone_ += static_cast<size_t>(count);
  }
  return true;
}

bool Introduction::read_greeting() {
  while (got_ < in_.size()) {
    const ssize_t count = ::recv(socket_.get(), in_.data() + got_, in_.size() - got_, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return false;
    if (count <= 0) {
      const int code = count == 0 ? ECONNRESET : errno;
      fail_with(std::strerror(code), code, false);
      return false;
    }
    got_ += static_cast<size_t>(count);
  }
  return true;
}

}  // namespace fsdp::comm::tcp
