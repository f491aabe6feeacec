// SPDX-License-Identifier: Apache-2.0
// Who is in the job, and on which host: known to every rank once all have come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::comm {

struct Member {
  uint32_t node = 0;            // hosts are numbered by their lowest rank
  std::string host;             // its name, for messages
  std::vector<std::byte> card;  // what the rank brought for its peers, at most 16 KiB; nothing in it is trusted
};

struct Roster {
  std::vector<Member> members;  // by rank

  uint32_t node_count() const;
  std::vector<uint32_t> ranks_of(uint32_t node) const;
};

// The number of each rank's host, given what identifies the host of each.
std::vector<uint32_t> number_nodes(const std::vector<std::string> &host_ids);

// What ranks share exactly if they can share memory and meet on a unix socket: boot and network namespace.
std::string host_identity();
std::string host_name();

}  // namespace fsdp::comm
