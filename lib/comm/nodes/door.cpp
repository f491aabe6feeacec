// SPDX-License-Identifier: Apache-2.0
#include "comm/nodes/door.h"

#include <algorithm>
#include <cerrno>

namespace fsdp::comm {
namespace {

// For the proof. One that makes room for another has had less; who has proven the secret may have a slow machine.
constexpr auto stranger_time = std::chrono::seconds(2), proven_time = std::chrono::seconds(20);
constexpr size_t most_strangers = 2 * tree_degree;  // all children may come at once

}  // namespace

void Door::add_polls(std::vector<pollfd> &polls, bool takes) const {
  if (takes && pause_.over()) polls.push_back({listener_.get(), POLLIN, 0});
  for (const Stranger &s : strangers_) polls.push_back({(s.socket ? s.socket : s.stream.socket()).get(), POLLIN, 0});
}

std::vector<Door::Newcomer> Door::look(bool takes) {
  if (takes && pause_.over()) accept();
  std::vector<Newcomer> newcomers;
  for (Stranger &stranger : strangers_) hear(stranger, newcomers);
  const auto now = Clock::now();
  std::erase_if(strangers_, [now](const Stranger &s) { return s.gone || now >= s.deadline; });
  return newcomers;
}

// Whoever has proven nothing makes room, the oldest first.
bool Door::has_room() {
  if (strangers_.size() < most_strangers) return true;
  const auto oldest = std::ranges::find_if(strangers_, [](const Stranger &s) { return static_cast<bool>(s.socket); });
  if (oldest == strangers_.end()) return false;
  strangers_.erase(oldest);
  return true;
}

void Door::accept() {
  for (size_t taken = 0; taken < most_strangers; ++taken) {
    Fd socket = accept_from(listener_);
    if (!socket) {
      pause_.note(errno);
      return;
    }
    pause_.clear();
    if (!has_room()) return;  // all have proven the secret, and are about to say who they are
    strangers_.push_back(
        {std::move(socket), Handshake(Role::host, plan_.secret, label_), Clock::now() + stranger_time, {}});
  }
}

void Door::hear(Stranger &stranger, std::vector<Newcomer> &newcomers) {
  if (stranger.socket) {
    const auto state = stranger.handshake.advance(stranger.socket);
    if (state == Handshake::State::failed) stranger.gone = true;
    if (state != Handshake::State::proven) return;
    stranger.stream = FrameStream(std::move(stranger.socket), nodes::longest, stranger.handshake.keys());
    stranger.deadline = Clock::now() + proven_time;
  }
  const auto frame = stranger.stream.receive();
  if (!frame) {
    stranger.gone = !stranger.stream.open();
    return;
  }
  stranger.gone = true;
  if (const auto said = read_hello(plan_, *frame)) newcomers.push_back({*said, std::move(stranger.stream)});
}

}  // namespace fsdp::comm
