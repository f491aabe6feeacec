// SPDX-License-Identifier: Apache-2.0
// What a rank brings to the rendezvous for ranks of other hosts: how its messages and, should it lead its node, the
// other leaders reach it.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/descriptors.h"
#include "comm/net.h"

namespace fsdp::comm {

struct Card {
  NetChoice asked = NetChoice::automatic;
  std::vector<std::byte> tcp = {}, ucx = {};  // Net::address of each that there is
  std::string leader = {};                    // LeaderListener::address
  std::string obstacle = {};                  // why there is no ucx
  Descriptors descriptors = {};               // of its process
  NetProtection protection = {};
  uint32_t ucx_major = 0;             // of what ucx is of
  std::vector<std::byte> nonce = {};  // rank 0's is the job's
};

std::vector<std::byte> write_card(const Card &card);
// What of a card's texts somebody will ask for. The rest is left out: a rank of a large job keeps the cards of all.
struct CardTexts {
  bool leader = true, obstacle = true;
};
// A peer wrote it: empty if it is not one.
std::optional<Card> read_card(std::span<const std::byte> bytes, CardTexts texts = {});

}  // namespace fsdp::comm
