// SPDX-License-Identifier: Apache-2.0
// What a rank keeps of the cards of all.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "membership/join/roster.h"
#include "transport/hierarchy/choice.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport {

struct JobCards {
  NetDecision net;
  NetAddresses addresses;            // by rank, of what was decided for
  std::vector<std::string> leaders;  // Card::leader, by host
  std::vector<std::byte> nonce;      // the job's
};

// All ranks read the same cards, so none has to be told of what is wrong with them: it is thrown, naming the first rank
// that has brought no card, cannot be reached as the others can, or lacks descriptors.
JobCards read_cards(const Roster &roster);

}  // namespace fsdp::transport
