// SPDX-License-Identifier: Apache-2.0
#include "transport/message/tcp/introduction.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace fsdp::transport::tcp {
namespace {

constexpr uint32_t greeting_magic = 0x66736768, greeting_version = 1, native_order = 0x01020304;

}  // namespace

JobNames::~JobNames() { ::explicit_bzero(key.data(), key.size()); }

std::string JobNames::label(uint32_t to) const { return format_text("libfsdp messages to rank {} of {}", to, name); }

Introduction::Introduction(const JobNames &job, uint32_t to, const Endpoint &place, Clock::time_point deadline,
                           Clock::time_point last)
    : job_(job), role_(Role::guest), peer_(to), place_(place), deadline_(deadline), last_(last) {
  socket_ = begin_connecting(place, code_);
  connecting_ = true;
}

Introduction::Introduction(const JobNames &job, Acceptor::AuthenticatedSocket arrival, Clock::time_point deadline)
    : job_(job),
      role_(Role::host),
      from_(std::move(arrival.from)),
      deadline_(deadline),
      last_(deadline),
      socket_(std::move(arrival.socket)) {}

void Introduction::hang_up() noexcept {
  if (socket_) ::shutdown(socket_.get(), SHUT_RDWR);
  socket_.reset();
}

IoState Introduction::fail_with(std::string problem, int code, bool final) {
  problem_ = std::move(problem);
  code_ = code;
  final_ = final;
  hang_up();
  return IoState::failed;
}

bool Introduction::wants_room() const noexcept {
  return connecting_ || (handshake_ && handshake_->wants_to_send()) || gone_ < out_bytes_ || (tls_ && tls_->unsent());
}

IoState Introduction::advance() {
  if (!problem_.empty()) return IoState::failed;
  IoState state = connecting_ ? connect() : IoState::done;
  if (state == IoState::done && role_ == Role::guest) state = prove();
  if (state == IoState::done && !greeted_) state = greet();
  if (state == IoState::done && job_.protection.encryption) state = encrypt();
  if (state == IoState::waiting && Clock::now() >= limit())
    return fail_with("the other end has not answered in time", ETIMEDOUT, false);
  return state;
}

Introduction::Clock::time_point Introduction::limit() const noexcept { return spoken_ ? last_ : deadline_; }

IoState Introduction::connect() {
  const int code = socket_ && (code_ == 0 || code_ == EINPROGRESS) ? connecting_result(socket_, place_) : code_;
  if (code == EINPROGRESS) return IoState::waiting;
  if (code) return fail_with(format_text("{}: {}", place_.text(), std::strerror(code)), code, false);
  code_ = 0;
  connecting_ = false;
  return IoState::done;
}

IoState Introduction::prove() {
  if (!handshake_) handshake_.emplace(role_, job_.secret, job_.label(peer_));
  switch (handshake_->advance(socket_)) {
    case IoState::waiting: return IoState::waiting;
    case IoState::failed: return fail_with(handshake_->problem(), EPROTO, !handshake_->ended());
    case IoState::done: break;
  }
  return IoState::done;
}

Greeting Introduction::own_greeting() const noexcept {
  return {greeting_magic,           greeting_version,          native_order, job_.world_size, job_.rank, peer_,
          job_.protection.checksum, job_.protection.encryption};
}

// The connecting end sends its greeting first.
IoState Introduction::greet() {
  if (role_ == Role::guest && !write_greeting()) return problem_.empty() ? IoState::waiting : IoState::failed;
  if (!read_greeting()) return problem_.empty() ? IoState::waiting : IoState::failed;
  Greeting said;
  std::memcpy(&said, in_.data(), sizeof said);
  if (role_ == Role::host) peer_ = said.from;
  const Greeting mine = own_greeting();
  const bool fits = said.magic == mine.magic && said.version == mine.version && said.byte_order == mine.byte_order &&
                    said.world_size == mine.world_size && said.to == job_.rank && said.from == peer_;
  if (!fits || peer_ >= job_.world_size || (role_ == Role::host && peer_ >= job_.rank))
    return fail_with("the other end is a rank of another job, or of another version of this library", EPROTO, true);
  if (said.checksum != mine.checksum || said.encryption != mine.encryption)
    return fail_with("the other end has another FSDP_NET_CHECKSUM or FSDP_NET_ENCRYPTION", EPROTO, true);
  if (role_ == Role::host && !write_greeting()) return problem_.empty() ? IoState::waiting : IoState::failed;
  greeted_ = true;
  return IoState::done;
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
  return spoken_ = true;
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

IoState Introduction::encrypt() {
  if (!tls_) {
    const uint32_t guest = role_ == Role::guest ? job_.rank : peer_, host = role_ == Role::guest ? peer_ : job_.rank;
    const std::string identity = format_text("libfsdp messages, rank {} to rank {}", guest, host);
    tls_ = std::make_unique<Tls>(*job_.tls, role_, job_.key, identity);
  }
  if (!shaken_) {
    const IoState state = tls_->shake_hands(socket_);
    if (state == IoState::waiting) return IoState::waiting;
    if (state == IoState::failed) return fail_with(tls_->problem(), EPROTO, !tls_->hung_up());
    own_binding_ = binding_of(role_);
    gone_ = got_ = 0;
    out_bytes_ = own_binding_.size();
    shaken_ = true;
  }
  return bind();
}

Binding Introduction::binding_of(Role role) const {
  const Greeting mine = own_greeting();
  const bool guest = role == Role::guest;
  const uint32_t ranks[] = {role == role_ ? mine.from : mine.to, role == role_ ? mine.to : mine.from, mine.world_size};
  const Digest exported = tls_->exported();
  return authenticate(job_.secret, guest ? "libfsdp messages bound by the guest" : "libfsdp messages bound by the host",
                      {exported, {reinterpret_cast<const uint8_t *>(ranks), sizeof ranks}});
}

IoState Introduction::bind() {
  const bool written = gone_ == out_bytes_ || write_binding();
  if (!problem_.empty()) return IoState::failed;
  if (!read_binding()) return problem_.empty() ? IoState::waiting : IoState::failed;
  if (!bound_ && !equal(said_binding_, binding_of(role_ == Role::guest ? Role::host : Role::guest)))
    return fail_with("what the other end says within TLS is of another connection", EPROTO, true);
  bound_ = true;
  return written && !tls_->unsent() ? IoState::done : IoState::waiting;
}

bool Introduction::write_binding() {
  const iovec part{own_binding_.data() + gone_, out_bytes_ - gone_};
  const ssize_t count = tls_->send(socket_, &part, 1);
  if (count < 0 && errno != EAGAIN)
    fail_with(tls_->write_problem().empty() ? std::strerror(errno) : tls_->write_problem(), errno, false);
  if (count > 0) gone_ += static_cast<size_t>(count);
  return gone_ == out_bytes_;
}

bool Introduction::read_binding() {
  while (got_ < said_binding_.size()) {
    const iovec part{said_binding_.data() + got_, said_binding_.size() - got_};
    const ssize_t count = tls_->receive(socket_, &part, 1);
    if (count < 0 && errno == EAGAIN) return false;
    if (count <= 0) {
      const int code = count == 0 ? ECONNRESET : errno;
      fail_with(tls_->problem().empty() ? std::strerror(code) : tls_->problem(), code, false);
      return false;
    }
    got_ += static_cast<size_t>(count);
  }
  return true;
}

}  // namespace fsdp::transport::tcp
