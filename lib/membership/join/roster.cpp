// SPDX-License-Identifier: Apache-2.0
#include "membership/join/roster.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>

#include "base/error.h"
#include "membership/join/message.h"

namespace fsdp::membership {

bool Roster::add(message::Entries entries) {
  if (entries.first_rank() != size()) return false;
  uint32_t count = node_count_;
  for (const uint32_t node : entries.nodes()) {
    if (node > count) return false;
    count += node == count;
  }
  nodes_.insert(nodes_.end(), entries.nodes().begin(), entries.nodes().end());
  node_count_ = count;
  parts_.push_back(std::move(entries));
  return true;
}

void Roster::add(const message::RosterEntry &entry) {
  if (parts_.empty() || !parts_.back().takes(entry, message::longest)) parts_.emplace_back(entry.rank);
  parts_.back().add(entry);
  nodes_.push_back(entry.node);
  node_count_ = std::max(node_count_, entry.node + 1);
}

std::string Roster::host_of(uint32_t rank) const {
  std::string host;
  visit(rank, [&](const message::RosterEntry &entry) { host = entry.host; });
  return host;
}

std::vector<std::byte> Roster::card_of(uint32_t rank) const {
  std::vector<std::byte> card;
  visit(rank, [&](const message::RosterEntry &entry) { card.assign(entry.card.begin(), entry.card.end()); });
  return card;
}

template <class Visit>
void Roster::visit(uint32_t rank, Visit &&look) const {
  const auto part = std::ranges::upper_bound(parts_, rank, {}, &message::Entries::first_rank) - 1;
  message::EntryReader reader(part->body());
  for (message::RosterEntry entry; reader.next(entry);)
    if (entry.rank == rank) return look(entry);
}

std::vector<uint32_t> Roster::ranks_of(uint32_t node) const {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < size(); ++r)
    if (nodes_[r] == node) ranks.push_back(r);
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

std::string network_namespace() {
  char name[64] = {};
  return ::readlink("/proc/self/ns/net", name, sizeof name - 1) > 0 ? name : "not known";
}

std::string describe_split_host(const std::vector<std::string> &host_ids) {
  std::map<std::string, size_t> first;  // key: identity of a boot; value: its first rank
  for (size_t rank = 0; rank < host_ids.size(); ++rank) {
    const auto [found, fresh] = first.emplace(host_ids[rank].substr(0, host_ids[rank].find('/')), rank);
    if (!fresh && host_ids[found->second] != host_ids[rank])
      return format_text(
          "ranks {} and {} are on one machine, in two network namespaces: they count as two hosts, share no memory and "
          "exchange messages by the network; start them in one network namespace to share memory",
          found->second, rank);
  }
  return {};
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 && name[0] ? name : "a host without name";
}

}  // namespace fsdp::membership
