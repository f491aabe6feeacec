// SPDX-License-Identifier: Apache-2.0
// Which ranks are in the job, and on which hosts: known to every rank once all have come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "membership/join/message.h"

namespace fsdp::membership {

// It stays in the parts that it came in. In a large job a rank reads it whole, once, and in order.
class Roster {
 public:
  // Of the next ranks; a host's number is that of one before, or the next. False: they are of others, and the roster is
  // as it was.
  bool add(message::Entries entries);
  // Of the next rank, on the rank that makes the roster: none of it has come from elsewhere.
  void add(const message::RosterEntry &entry);

  uint32_t size() const noexcept { return static_cast<uint32_t>(nodes_.size()); }
  const std::vector<message::Entries> &parts() const noexcept { return parts_; }
  // Hosts are numbered by their lowest ranks.
  const std::vector<uint32_t> &nodes() const noexcept { return nodes_; }  // of each rank
  uint32_t node_count() const noexcept { return node_count_; }
  std::vector<uint32_t> ranks_of(uint32_t node) const;
  std::string host_of(uint32_t rank) const;             // its host's name, for messages
  std::vector<std::byte> card_of(uint32_t rank) const;  // what it brought for its peers: nothing in it is trusted
  // visit(entry, leads): in the order of ranks. leads: no rank before it is of its host.
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

// The number of each rank's host, given what identifies the host of each.
std::vector<uint32_t> number_nodes(const std::vector<std::string> &host_ids);

// What ranks share exactly if they can share memory and meet on a unix socket: boot and network namespace.
std::string host_identity();
// This process's, as in "net:[4026531840]". Ranks in two of them do not meet on a unix socket or a loopback address.
std::string network_namespace();
// Two ranks of one machine that count as two hosts, for the log; empty if there are none.
std::string describe_split_host(const std::vector<std::string> &host_ids);
std::string host_name();

}  // namespace fsdp::membership
