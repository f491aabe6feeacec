// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/dial.h"

#include <cerrno>
#include <cstring>

namespace fsdp::membership {
namespace {

constexpr auto dial_time = std::chrono::seconds(3);  // a lost packet of it is sent again ever later

}  // namespace

Dial::Dial(const NodePlan &plan, uint32_t to, tree::Bond bond)
    : plan_(plan), to_(to), bond_(bond), end_(parse_address(plan.nodes[to].address)), since_(Clock::now()) {
  int code = 0;
  socket_ = begin_connecting(end_, code);
  if (code != 0 && code != EINPROGRESS) fail(State::ended, format_text("{}: {}", end_.text(), std::strerror(code)));
}

void Dial::fail(State state, std::string problem) {
  state_ = state;
  problem_ = std::move(problem);
  socket_.reset();
  handshake_.reset();
  stream_ = FrameStream();
}

Dial::State Dial::advance() {
  if (state_ == State::trying && connecting_) connect();
  if (state_ == State::trying && handshake_) prove();
  if (state_ == State::trying && stream_) hear_answer();
  return state_;
}

void Dial::connect() {
  const int code = connecting_result(socket_, end_);
  if (code == EINPROGRESS) {
    if (Clock::now() - since_ >= dial_time) fail(State::ended, format_text("{} does not answer", end_.text()));
    return;
  }
  connecting_ = false;
  deserted_ = code == ECONNREFUSED;
  if (code != 0)
    return fail(deserted_ ? State::refused : State::ended, format_text("{}: {}", end_.text(), std::strerror(code)));
  handshake_.emplace(Role::guest, plan_.secret, link_label(plan_));
}

void Dial::prove() {
  const auto state = handshake_->advance(socket_);
  if (state == Handshake::State::failed)
    return fail(handshake_->ended() ? State::ended : State::refused, std::string(handshake_->problem()));
  if (state != Handshake::State::proven) return;
  stream_ = FrameStream(std::move(socket_), tree::longest, handshake_->keys());
  handshake_.reset();
  greet(stream_, plan_, bond_);
}

void Dial::hear_answer() {
  stream_.flush();
  const auto frame = stream_.receive();
  if (!frame) {
    if (!stream_.open()) fail(State::ended, std::string(stream_.problem()));
    return;
  }
  const auto theirs = read_hello(plan_, *frame);
  if (!theirs || theirs->node != to_)
    return fail(State::refused, "it answered as a node of another job, or of another version of this library");
  state_ = State::answered;
}

pollfd Dial::poll() const {
  const int socket = stream_ ? stream_.socket().get() : socket_.get();
  const bool sends = connecting_ || (handshake_ && handshake_->wants_to_send()) || (stream_ && stream_.sending());
  return {socket, static_cast<short>((connecting_ ? 0 : POLLIN) | (sends ? POLLOUT : 0)), 0};
}

}  // namespace fsdp::membership
