// SPDX-License-Identifier: Apache-2.0
// Descriptors that a rank of a job over several hosts needs, beside those that it has open when ranks meet: counted
// before it runs out of them, since what fails then says nothing of why.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::transport {

// Of this process: RLIMIT_NOFILE, and how many there are.
struct Descriptors {
  uint32_t limit = 0, open = 0;
};
Descriptors count_descriptors();

struct DescriptorNeed {
  uint32_t control = 0;   // of a rank that leads its host: to its neighbours in the tree of leaders, and what it needs
                          // if one of these is lost
  uint32_t messages = 0;  // one a rank of another host that it sends to or hears from
  uint64_t all() const noexcept;
};
// For connections that have not yet proven anything, memory that ranks of a host share, and files.
constexpr uint32_t spare_descriptors = 96;

// "it needs 300 more descriptors (...), but ...: raise ..."; empty: there are enough.
std::string find_shortage(const Descriptors &has, const DescriptorNeed &need);

}  // namespace fsdp::transport
