// SPDX-License-Identifier: Apache-2.0

#include "transport/message/channel/transport.h"

#include "base/error.h"

namespace fsdp::transport::messages {

namespace {

// A peer is at most one call ahead in each of the few communicators that do not exist on this rank yet.
constexpr uint32_t max_held = 256;
constexpr size_t max_held_early = 65536;  // before this rank has joined: a few per rank of the largest job

}  // namespace

Receiver *Receivers::find(uint64_t key) const noexcept {
  const auto found = receivers_.find(key);
  return found == receivers_.end() ? nullptr : found->second;
}

void Receivers::add(uint64_t key, Receiver &receiver, uint32_t rank) {
  if (!known_.insert(key).second) fail(FSDP_INTERNAL, "rank {}: two communicators with the key {:x}", rank, key);
  receivers_.emplace(key, &receiver);
  std::erase_if(held_, [&](const Held &held) {
    if (held.header.key != key) return false;
    receiver.control(held.header, held.payload.data(), held.payload.size());
    if (held.header.from < held_count_by_sender_.size() && held_count_by_sender_[held.header.from] > 0)
      --held_count_by_sender_[held.header.from];
    return true;
  });
}

void Receivers::remove(uint64_t key) noexcept { receivers_.erase(key); }

bool Receivers::keep(const Header &header, const void *payload, uint64_t bytes) {
  if (header.kind == Kind::ask && questions_.size() < max_held) questions_.push_back(header);
  if (header.kind == Kind::data || header.kind == Kind::ask || known_.count(header.key)) return true;
  if (header.from < held_count_by_sender_.size() && ++held_count_by_sender_[header.from] > max_held) return false;
  if (held_count_by_sender_.empty() && held_.size() >= max_held_early) return true;
  const auto *begin = static_cast<const std::byte *>(payload);
  held_.push_back({header, {begin, begin + bytes}});
  return true;
}

}  // namespace fsdp::transport::messages
