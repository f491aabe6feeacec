// SPDX-License-Identifier: Apache-2.0
// The descriptors that a rank of a job over several hosts needs, besides those that it has open when the ranks meet.
// They are counted before the rank runs out of them, since an error at that point would not say why.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::transport {

// The limit of this process (RLIMIT_NOFILE), and how many descriptors are open.
struct Descriptors {
  uint32_t limit = 0, open = 0;
};
Descriptors count_descriptors();

struct DescriptorNeed {
  uint32_t control = 0;   // for a rank that leads its host: connections to its neighbours in the tree of leaders, and
                          // those that it needs if a neighbour is lost
  uint32_t messages = 0;  // one for each rank of another host that it sends to or hears from
  uint64_t all() const noexcept;
};
// Spare descriptors for connections that have not yet been authenticated, memory that ranks of a host share, and files.
constexpr uint32_t spare_descriptors = 96;
// Returns "it needs 300 more descriptors (...), but ...: raise ...", or an empty text if there are enough.
std::string find_shortage(const Descriptors &has, const DescriptorNeed &need);

}  // namespace fsdp::transport
