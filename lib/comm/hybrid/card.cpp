// SPDX-License-Identifier: Apache-2.0
#include "comm/hybrid/card.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace fsdp::comm {
namespace {

constexpr size_t longest_leader = 64;

}  // namespace

// The length of the first part, the first part, the second part.
std::vector<std::byte> write_card(const Card &card) {
  const auto length = static_cast<uint32_t>(card.net.size());
  std::vector<std::byte> bytes(sizeof length + card.net.size() + card.leader.size());
  std::memcpy(bytes.data(), &length, sizeof length);
  std::copy(card.net.begin(), card.net.end(), bytes.begin() + sizeof length);
  std::memcpy(bytes.data() + sizeof length + card.net.size(), card.leader.data(), card.leader.size());
  return bytes;
}

std::optional<Card> read_card(std::span<const std::byte> bytes) {
  uint32_t length = 0;
  if (bytes.size() < sizeof length) return {};
  std::memcpy(&length, bytes.data(), sizeof length);
  bytes = bytes.subspan(sizeof length);
  if (length > bytes.size() || bytes.size() - length > longest_leader) return {};
  Card card;
  card.net.assign(bytes.begin(), bytes.begin() + length);
  const auto leader = bytes.subspan(length);
  card.leader.assign(reinterpret_cast<const char *>(leader.data()), leader.size());
  return card;
}

}  // namespace fsdp::comm
