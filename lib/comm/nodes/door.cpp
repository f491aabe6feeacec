// SPDX-License-Identifier: Apache-2.0
#include "comm/nodes/door.h"

#include <cerrno>

namespace fsdp::comm {
namespace {

constexpr auto stranger_time = std::chrono::seconds(2);

}  // namespace

void Door::add_polls(std::vector<pollfd> &polls, size_t most) const {
  if (open(most)) polls.push_back({listener_.get(), POLLIN, 0});
  for (const Stranger &s : strangers_) polls.push_back({(s.socket ? s.socket : s.stream.socket()).get(), POLLIN, 0});
}

std::vector<Door::Newcomer> Door::look(size_t most) {
  accept(most);
  std::vector<Newcomer> newcomers;
  for (Stranger &stranger : strangers_) hear(stranger, newcomers);
  const auto now = Clock::now();
  std::erase_if(strangers_, [now](const Stranger &s) { return s.gone || now >= s.deadline; });
  return newcomers;
}

void Door::accept(size_t most) {
  while (open(most)) {
    Fd socket = accept_from(listener_);
    if (!socket) {
      pause_.note(errno);
      return;
    }
    pause_.clear();
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
