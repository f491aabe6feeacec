// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/door.h"

#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

namespace fsdp::membership {
namespace {

// For the proof. One that makes room for another has had less; a machine that has proven the secret may be slow.
constexpr auto stranger_time = std::chrono::seconds(2), proven_time = std::chrono::seconds(20);
constexpr size_t crowd = tree_degree;
// So many that a flood of 2,000 connections a second still leaves each its least time.
constexpr size_t usual_most_strangers = 512;

// A quarter of the descriptors that this process may have, but as many as all children need that come at once.
size_t most_strangers() {
  rlimit limit{};
  const bool known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  const size_t share = known ? static_cast<size_t>(limit.rlim_cur / 4) : usual_most_strangers;
  return std::clamp<size_t>(share, 2 * tree_degree, usual_most_strangers);
}

bool waits(const Fd &listener) {
  pollfd entry{listener.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

}  // namespace

Door::Door(const NodePlan &plan, const Fd &listener)
    : plan_(plan), listener_(listener), label_(link_label(plan)), most_strangers_(most_strangers()) {}

bool Door::crowded() const {
  return std::ranges::count_if(strangers_, [](const Stranger &s) { return static_cast<bool>(s.socket); }) >
         static_cast<std::ptrdiff_t>(crowd);
}

void Door::add_polls(std::vector<pollfd> &polls, bool takes) const {
  const bool strangers = !crowded();
  if (strangers && takes && pause_.over()) polls.push_back({listener_.get(), POLLIN, 0});
  for (const Stranger &s : strangers_)
    if (!s.socket || strangers) polls.push_back({(s.socket ? s.socket : s.stream.socket()).get(), POLLIN, 0});
}

// What has come is read before anyone makes room: an answer may have waited here since the last look.
std::vector<Door::Newcomer> Door::look(bool takes) {
  std::vector<Newcomer> newcomers;
  for (Stranger &stranger : strangers_) hear(stranger, newcomers);
  std::erase_if(strangers_, [](const Stranger &s) { return s.gone; });
  if (takes && pause_.over()) accept(newcomers);
  const auto now = Clock::now();
  std::erase_if(strangers_, [now](const Stranger &s) { return s.gone || now >= s.deadline; });
  return newcomers;
}

// Of the address that has more than half of the places; the end if there is none. By Boyer and Moore's vote.
std::vector<Door::Stranger>::iterator Door::find_oldest_of_most() {
  const std::string *most = nullptr;
  size_t votes = 0;
  for (const Stranger &s : strangers_) {
    if (!s.socket) continue;
    if (votes == 0) most = &s.from;
    votes = s.from == *most ? votes + 1 : votes - 1;
  }
  const auto is_of_most = [most](const Stranger &s) { return s.socket && s.from == *most; };
  if (!most || static_cast<size_t>(std::ranges::count_if(strangers_, is_of_most)) <= most_strangers_ / 2)
    return strangers_.end();
  return std::ranges::find_if(strangers_, is_of_most);
}

// Else the oldest that has proven nothing makes room once it has had its least time, and others wait in the kernel.
bool Door::has_room() {
  if (strangers_.size() < most_strangers_) return true;
  if (const auto one = find_oldest_of_most(); one != strangers_.end()) {
    strangers_.erase(one);
    return true;
  }
  const auto oldest = std::ranges::find_if(strangers_, [](const Stranger &s) { return static_cast<bool>(s.socket); });
  if (oldest == strangers_.end() || Clock::now() < oldest->deadline - stranger_time + least_time) return false;
  strangers_.erase(oldest);
  return true;
}

// Only where a connection waits does another make room for it.
void Door::accept(std::vector<Newcomer> &newcomers) {
  for (size_t taken = 0; taken < most_strangers_ && waits(listener_) && has_room(); ++taken) {
    Fd socket = accept_from(listener_);
    if (!socket) {
      pause_.note(errno);
      return;
    }
    pause_.clear();
    std::string from = Endpoint::peer(socket).address();
    strangers_.push_back({std::move(socket),
                          std::move(from),
                          Handshake(Role::host, plan_.secret, label_),
                          Clock::now() + stranger_time,
                          {}});
    hear(strangers_.back(), newcomers);
  }
}

void Door::hear(Stranger &stranger, std::vector<Newcomer> &newcomers) {
  if (stranger.socket) {
    const auto state = stranger.handshake.advance(stranger.socket);
    if (state == Handshake::State::failed) stranger.gone = true;
    if (state != Handshake::State::proven) return;
    stranger.stream = FrameStream(std::move(stranger.socket), tree::longest, stranger.handshake.keys());
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

}  // namespace fsdp::membership
