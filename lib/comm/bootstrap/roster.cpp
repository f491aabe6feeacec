// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap/roster.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>

#include "base/error.h"

namespace fsdp::comm {

uint32_t Roster::node_count() const {
  uint32_t count = 0;
  for (const Member &member : members) count = std::max(count, member.node + 1);
  return count;
}

std::vector<uint32_t> Roster::ranks_of(uint32_t node) const {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < members.size(); ++r)
    if (members[r].node == node) ranks.push_back(r);
  return ranks;
}

std::vector<uint32_t> number_nodes(const std::vector<std::string> &host_ids) {
  std::map<std::string, uint32_t> numbers;
  std::vector<uint32_t> nodes;
  for (const std::string &id : host_ids)
    nodes.push_back(numbers.emplace(id, static_cast<uint32_t>(numbers.size())).first->second);
  return nodes;
}

std::string host_identity() {
  constexpr const char *boot_path = "/proc/sys/kernel/random/boot_id";
  constexpr const char *namespace_path = "/proc/self/ns/net";
  std::string boot;
  std::ifstream(boot_path) >> boot;
  if (boot.empty()) fail(FSDP_SYSTEM, "{} cannot be read: it tells which ranks share a host", boot_path);
  struct stat status;
  if (::stat(namespace_path, &status) != 0) fail_errno(errno, namespace_path);
  return format_text("{}/{}", boot, status.st_ino);
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 && name[0] ? name : "a host without name";
}

}  // namespace fsdp::comm
