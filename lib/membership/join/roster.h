// SPDX-License-Identifier: Apache-2.0
// The ranks of the job and their hosts. Every rank knows the roster once all ranks have arrived.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "membership/join/message.h"

namespace fsdp::membership {

// Stored in the sections in which it arrived. In a large job a rank reads all of it only once, in order.
class Roster {
 public:
  // Adds the next ranks. Returns false, and leaves the roster unchanged, if these are not the next ranks, or if a
  // host's number is neither known nor the next one.
  bool add(message::Entries entries);
  // Adds the next rank, on the rank that makes the roster; the entry is not checked.
  void add(const message::RosterEntry &entry);

  uint32_t size() const noexcept { return static_cast<uint32_t>(nodes_.size()); }
  const std::vector<message::Entries> &parts() const noexcept { return parts_; }
  // Hosts are numbered in the order of their lowest ranks.
  const std::vector<uint32_t> &nodes() const noexcept { return nodes_; }  // number of the host, by rank
  uint32_t node_count() const noexcept { return node_count_; }
  std::vector<uint32_t> ranks_of(uint32_t node) const;
  std::string host_of(uint32_t rank) const;             // the name of the rank's host, for messages
  std::vector<std::byte> card_of(uint32_t rank) const;  // the bytes that the rank sent to its peers; untrusted
  // Calls visit(entry, leads) in the order of ranks. `leads`: the rank is the first of its host.
  template <class Visit>
  void for_each(Visit &&visit) const {
    uint32_t nodes = 0;
    for (const message::Entries &part : parts_) {
      message::EntryReader reader(part.body());
      for (message::RosterEntry entry; reader.next(entry);) {
        const bool leads = entry.node == nodes;
        nodes += leads;
        visit(entry, leads);
      }
    }
  }

 private:
  template <class Visit>
  void visit(uint32_t rank, Visit &&look) const;

  std::vector<message::Entries> parts_;
  std::vector<uint32_t> nodes_;
  uint32_t node_count_ = 0;
};

// The number of each rank's host, given the identity of each rank's host.
std::vector<uint32_t> number_nodes(const std::vector<std::string> &host_ids);

// Identity of this host: the boot and the network namespace. Two ranks have the same identity if and only if they can
// share memory and meet on a unix socket.
std::string host_identity();
// This process's network namespace, for example "net:[4026531840]". Ranks in different namespaces cannot meet on a unix
// socket or a loopback address.
std::string network_namespace();
// Names two ranks of one machine that count as two hosts, for the log; empty if there are none.
std::string describe_split_host(const std::vector<std::string> &host_ids);
std::string host_name();

}  // namespace fsdp::membership
