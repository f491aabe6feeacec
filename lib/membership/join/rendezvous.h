// SPDX-License-Identifier: Apache-2.0
// How ranks as processes meet. Ranks of one host meet through an abstract unix socket, where the lowest rank listens.
// All get the host's control memory, a pidfd of every rank and a way into every rank's mailbox. Nothing of it is in the
// file system. Ranks of several hosts meet at a TCP rendezvous first, which says where each rank is; then the ranks of
// each host meet as above.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "base/fd.h"
#include "membership/job.h"
#include "membership/join/forming_watch.h"
#include "membership/join/roster.h"
#include "membership/liveness/links.h"
#include "membership/wire/secret.h"

namespace fsdp::membership {

// Each rank has two descriptors for each peer of its host.
constexpr uint32_t most_ranks_of_a_host = 1024;

struct Rendezvous {
  Fd control;  // of this host, with room for every rank of the job
  std::unique_ptr<Links> links;
  std::string description;
  Roster roster;
  // Where the ranks met over a network: to be finished when all have met, and can see each other's end.
  std::unique_ptr<FormingWatch> watch;
};

// For each step that follows the rendezvous. All have come, so a rank that is silent for a while is stopped or cut off;
// a death is noticed without a limit. since: when this rank began to join.
uint32_t forming_limit_ms(const WorldOptions &options, std::chrono::steady_clock::time_point since);

// What this rank brings for its peers, given the numeric address of the interface by which it reaches the rendezvous.
// Called at most once, and not at all where the ranks of one host meet by a unix socket alone.
using MakeCard = std::function<std::vector<std::byte>(const std::string &address)>;

// Blocks until all ranks have come. World sizes from 2.
Rendezvous meet_processes(const WorldOptions &options, const Waiter &waiter, const MakeCard &make_card);

// What a TCP rendezvous gives to every rank, and what both of its sides share.

struct Assembly {
  Roster roster;
  Nonce session{};  // of this job and attempt alone
  std::unique_ptr<FormingWatch> watch;
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
