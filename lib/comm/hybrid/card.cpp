// SPDX-License-Identifier: Apache-2.0
#include "comm/hybrid/card.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace fsdp::comm {
namespace {

constexpr size_t longest_leader = 64, longest_obstacle = 1024;

uint32_t length_of(size_t size) { return static_cast<uint32_t>(size); }

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

}  // namespace

// The lengths of the first two parts, then all three.
std::vector<std::byte> write_card(const Card &card) {
  const uint32_t lengths[] = {length_of(card.net.size()), length_of(card.leader.size())};
  const std::string texts = card.leader + card.obstacle.substr(0, longest_obstacle);
  std::vector<std::byte> bytes(sizeof lengths + card.net.size() + texts.size());
  std::memcpy(bytes.data(), lengths, sizeof lengths);
  std::copy(card.net.begin(), card.net.end(), bytes.begin() + sizeof lengths);
  std::memcpy(bytes.data() + sizeof lengths + card.net.size(), texts.data(), texts.size());
  return bytes;
}

std::optional<Card> read_card(std::span<const std::byte> bytes) {
  uint32_t lengths[2];
  if (bytes.size() < sizeof lengths) return {};
  std::memcpy(lengths, bytes.data(), sizeof lengths);
  bytes = bytes.subspan(sizeof lengths);
  const auto [net, leader] = lengths;
  if (net > bytes.size() || leader > bytes.size() - net || leader > longest_leader ||
      bytes.size() - net - leader > longest_obstacle)
    return {};
  Card card;
  card.net.assign(bytes.begin(), bytes.begin() + net);
  card.leader = text_of(bytes.subspan(net, leader));
  card.obstacle = text_of(bytes.subspan(net + leader));
  return card;
}

}  // namespace fsdp::comm
