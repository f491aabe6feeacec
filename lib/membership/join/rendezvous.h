// SPDX-License-Identifier: Apache-2.0
// How ranks as processes meet. Ranks of one host meet through an abstract unix socket, at which the lowest rank
// listens. Each rank gets the host's control memory, and for every other rank a pidfd and the sending end of its
// mailbox. Nothing of this is in the file system. Ranks of several hosts first meet at a TCP rendezvous, where each
// rank learns the host of every other. Then the ranks of each host meet at their unix socket.
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

// Limited by the number of descriptors: each rank has two for each peer on its host.
constexpr uint32_t max_ranks_of_a_host = 1024;

struct Rendezvous {
  Fd control;  // control memory of this host, with room for every rank of the job
  std::unique_ptr<Links> links;
  std::string description;
  Roster roster;
  // Set if the ranks met over a network. The caller calls finish() when the job has formed and the ranks can notice
  // each other's end by other means.
  std::unique_ptr<FormingWatch> watch;
};

// The time limit of each step after the rendezvous. All ranks have arrived, so a rank that is silent for that long is
// stopped or cut off; a death is noticed independently of the limit. `since`: when this rank began to join.
uint32_t forming_limit_ms(const WorldOptions &options, std::chrono::steady_clock::time_point since);

// Makes this rank's card: the bytes that it sends to its peers. The argument is the numeric address of the interface
// through which it reaches the rendezvous. Called at most once, and never if the ranks meet only at a unix socket.
using MakeCard = std::function<std::vector<std::byte>(const std::string &address)>;

// Blocks until all ranks have arrived. The world must have at least 2 ranks.
Rendezvous meet_processes(const WorldOptions &options, const Waiter &waiter, const MakeCard &make_card);

// The result of a TCP rendezvous for every rank, and helpers for both of its sides.

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
