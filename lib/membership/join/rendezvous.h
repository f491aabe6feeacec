// SPDX-License-Identifier: Apache-2.0
// How ranks as processes meet. Ranks of one host meet through an abstract unix socket, where the lowest rank listens.
// Each gets the host's control memory, and for every other rank a pidfd and the sending end of its mailbox. Nothing of
// this is in the file system. Ranks of several hosts meet at a TCP rendezvous first, which says where each rank is;
// then the ranks of each host meet as above.
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

// Limited by descriptors: each rank has two for each peer on its host.
constexpr uint32_t max_ranks_of_a_host = 1024;

struct Rendezvous {
  Fd control;  // control memory of this host, with room for every rank of the job
  std::unique_ptr<Links> links;
  std::string description;
  Roster roster;
  // Where the ranks met over a network: the caller finishes it when the job has formed and the ranks can see each
  // other's end without it.
  std::unique_ptr<FormingWatch> watch;
};

// The time limit of each step after the rendezvous. All ranks have come, so one that is silent for that long is stopped
// or cut off; a death is noticed without a limit. since: when this rank began to join.
uint32_t forming_limit_ms(const WorldOptions &options, std::chrono::steady_clock::time_point since);

// Makes this rank's card, the bytes that it sends to its peers, given the numeric address of the interface by which it
// reaches the rendezvous. Called at most once, and not at all where ranks of one host meet by a unix socket alone.
using MakeCard = std::function<std::vector<std::byte>(const std::string &address)>;

// Blocks until all ranks have come. The world has at least 2 ranks.
Rendezvous meet_processes(const WorldOptions &options, const Waiter &waiter, const MakeCard &make_card);

// What a TCP rendezvous gives to every rank; then helpers for both of its sides.

struct Assembly {
  Roster roster;
  Nonce session{};  // different for each job and attempt
  std::unique_ptr<FormingWatch> watch;
};

// The label that binds the proof of a connection to this rendezvous.
inline std::string rendezvous_label(const WorldOptions &options) { return "rendezvous of job " + options.job; }

inline std::string host_id_of(const WorldOptions &options) {
  return options.host_id.empty() ? host_identity() : options.host_id;
}

// Makes this rank's card and checks its size.
inline std::vector<std::byte> card_of(const MakeCard &make_card, const std::string &address) {
  auto card = make_card(address);
  if (card.size() > message::max_card_bytes)
    fail(FSDP_INTERNAL, "a card of {} bytes, at most {} are allowed", card.size(), message::max_card_bytes);
  return card;
}

}  // namespace fsdp::membership
