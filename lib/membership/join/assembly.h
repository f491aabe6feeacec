// SPDX-License-Identifier: Apache-2.0
// What a TCP rendezvous gives to every rank, and what both of its sides share.
#pragma once

#include "membership/join/rendezvous.h"
#include "membership/join/vigil.h"
#include "membership/wire/secret.h"

namespace fsdp::membership {

struct Assembly {
  Roster roster;
  Nonce session{};  // of this job and attempt alone
  std::unique_ptr<Vigil> vigil;
};

// What the proof of a connection to the rendezvous is for.
inline std::string rendezvous_label(const WorldOptions &options) { return "rendezvous of job " + options.job; }

inline std::string host_id_of(const WorldOptions &options) {
  return options.host_id.empty() ? host_identity() : options.host_id;
}

// This rank's card, checked.
inline std::vector<std::byte> card_of(const MakeCard &make_card, const std::string &address) {
  auto card = make_card(address);
  if (card.size() > message::most_card_bytes)
    fail(FSDP_INTERNAL, "a card of {} bytes, at most {} are allowed", card.size(), message::most_card_bytes);
  return card;
}

}  // namespace fsdp::membership
