// SPDX-License-Identifier: Apache-2.0
#include "transport/hierarchy/card.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace fsdp::transport {
namespace {

constexpr size_t longest_leader = 64, longest_obstacle = 1024, longest_nonce = 64;

uint32_t length_of(size_t size) { return static_cast<uint32_t>(size); }

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

struct CardHead {
  NetChoice asked;
  uint32_t tcp, ucx, leader;  // lengths; the obstacle has the rest
  uint32_t nonce;
  Descriptors descriptors;
  uint32_t checksum, encryption, ucx_major;
};

}  // namespace

// The head, then all parts.
std::vector<std::byte> write_card(const Card &card) {
  const auto &[checksum, encryption] = card.protection;
  const CardHead head{card.asked,
                      length_of(card.tcp.size()),
                      length_of(card.ucx.size()),
                      length_of(card.leader.size()),
                      length_of(card.nonce.size()),
                      card.descriptors,
                      checksum,
                      encryption,
                      card.ucx_major};
  std::vector<std::byte> bytes;
  const auto add = [&](std::span<const std::byte> part) { bytes.insert(bytes.end(), part.begin(), part.end()); };
  add(std::as_bytes(std::span(&head, 1)));
  add(card.tcp);
  add(card.ucx);
  add(card.nonce);
  add(std::as_bytes(std::span(card.leader)));
  add(std::as_bytes(std::span(card.obstacle.substr(0, longest_obstacle))));
  return bytes;
}

std::optional<Card> read_card(std::span<const std::byte> bytes) {
  CardHead head;
  if (bytes.size() < sizeof head) return {};
  std::memcpy(&head, bytes.data(), sizeof head);
  bytes = bytes.subspan(sizeof head);
  const uint64_t tcp = head.tcp, ucx = head.ucx, leader = head.leader, nonce = head.nonce;
  if (head.asked > NetChoice::ucx || tcp + ucx + nonce + leader > bytes.size() || leader > longest_leader ||
      tcp > longest_leader || nonce > longest_nonce || bytes.size() - tcp - ucx - nonce - leader > longest_obstacle)
    return {};
  Card card;
  card.asked = head.asked;
  card.descriptors = head.descriptors;
  card.ucx_major = head.ucx_major;
  card.protection = {head.checksum != 0, head.encryption != 0};
  const auto take = [&bytes](uint64_t length) {
    const auto part = bytes.first(length);
    bytes = bytes.subspan(length);
    return part;
  };
  card.tcp = take(tcp);
  card.ucx = take(ucx);
  card.nonce = take(nonce);
  card.leader = text_of(bytes.first(leader));
  card.obstacle = text_of(bytes.subspan(leader));
  return card;
}

}  // namespace fsdp::transport
