// SPDX-License-Identifier: Apache-2.0
// What a rank brings to the rendezvous for ranks of other hosts: how its messages and, should it lead its node, the
// other leaders reach it.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "transport/descriptors.h"
#include "transport/net.h"

namespace fsdp::transport {

// It names what others hold: who writes it, or the bytes that it was read from.
struct Card {
  NetChoice asked = NetChoice::automatic;
  std::span<const std::byte> tcp = {}, ucx = {};  // Net::address of each that there is
  std::string_view leader = {};                   // LeaderListener::address
  std::string_view obstacle = {};                 // why there is no ucx
  Descriptors descriptors = {};                   // of its process
  NetProtection protection = {};
  uint32_t ucx_major = 0;                 // of what ucx is of
  std::span<const std::byte> nonce = {};  // rank 0's is the job's
};

std::vector<std::byte> write_card(const Card &card);
// A peer wrote it: empty if it is not one.
std::optional<Card> read_card(std::span<const std::byte> bytes);

}  // namespace fsdp::transport
