// SPDX-License-Identifier: Apache-2.0
// Transport's receivers, and what comes for one that does not exist here yet, or no more.
#include "comm/ucx/transport.h"

namespace fsdp::comm::ucx {
namespace {

// A peer is at most one call ahead in each of a few communicators that do not exist here yet.
constexpr uint32_t most_held = 256;
constexpr size_t most_held_early = 65536;  // of all, before this rank has joined: some of each rank of the largest job

}  // namespace

Receiver *Transport::find(uint64_t key) noexcept {
  const auto found = receivers_.find(key);
  return found == receivers_.end() ? nullptr : found->second;
}

void Transport::add(uint64_t key, Receiver &receiver) {
  if (!receivers_.emplace(key, &receiver).second || removed_.count(key))
    fail(FSDP_INTERNAL, "rank {}: two communicators with the key {:x}", rank_, key);
  std::erase_if(held_, [&](const Held &held) {
    if (held.header.key != key) return false;
    receiver.control(held.header, held.payload.data(), held.payload.size());
    if (held.header.from < peers_.size() && peers_[held.header.from].held > 0) --peers_[held.header.from].held;
    return true;
  });
}

void Transport::remove(uint64_t key) noexcept {
  receivers_.erase(key);
  removed_.insert(key);
  for (const auto &message : messages_)
    if (message->header.key == key) message->receiver = nullptr;
}

// Later: within a callback of UCX nothing is sent. What cannot be sent is asked again.
void Transport::answer_for_nobody() {
  for (const Header &question : questions_) {
    if (question.from >= peers_.size() || !peers_[question.from].open) continue;
    Header answer = question;
    answer.kind = Kind::answer;
    answer.from = rank_;
    answer.bytes = 0;  // nothing was called
    send(question.from, take(answer, nullptr), nullptr, 0);
  }
  questions_.clear();
}

void Transport::hold(const Header &header, const void *payload, uint64_t bytes) {
  if (header.kind == Kind::ask && questions_.size() < most_held) questions_.push_back(header);
  if (header.kind == Kind::data || header.kind == Kind::ask || removed_.count(header.key)) return;
  if (header.from < peers_.size() && ++peers_[header.from].held > most_held)
    return fail_peer(header.from, UCS_ERR_EXCEEDS_LIMIT, "messages for communicators that do not exist here");
  if (peers_.empty() && held_.size() >= most_held_early) return;
  const auto *begin = static_cast<const std::byte *>(payload);
  held_.push_back({header, {begin, begin + bytes}});
}

}  // namespace fsdp::comm::ucx
