// SPDX-License-Identifier: Apache-2.0
#include "comm/nodes/datagrams.h"

#include <sys/socket.h>

#include <cstdlib>
#include <cstring>

#include "comm/bootstrap/secret.h"

namespace fsdp::comm {
namespace {

constexpr int most_at_once = 256;  // of a flood, in one round

struct Datagram {
  char magic[8];
  uint32_t node, to;
  uint64_t number;
  Digest proof;
};
constexpr char magic[8] = {'f', 's', 'd', 'p', 'b', 'e', 'a', 't'};

Digest prove_beat(const std::string &secret, const std::string &label, const Datagram &datagram) {
  uint8_t said[16];
  std::memcpy(said, &datagram.node, 4);
  std::memcpy(said + 4, &datagram.to, 4);
  std::memcpy(said + 8, &datagram.number, 8);
  return authenticate(secret, label, {said});
}

}  // namespace

Datagrams::Datagrams(const NodePlan &plan, Fd socket)
    : plan_(plan), socket_(std::move(socket)), label_("libfsdp beat " + plan.job), numbers_(plan.nodes.size()) {}

void Datagrams::beat(uint32_t node, uint64_t number) {
  auto end = ends_.find(node);
  if (end == ends_.end()) end = ends_.emplace(node, parse_address(plan_.nodes[node].address)).first;
  Datagram datagram{};
  std::memcpy(datagram.magic, magic, sizeof magic);
  datagram.node = plan_.node();
  datagram.to = node;
  datagram.number = number;
  datagram.proof = prove_beat(plan_.secret, label_, datagram);
  ::sendto(socket_.get(), &datagram, sizeof datagram, MSG_NOSIGNAL | MSG_DONTWAIT, end->second.get(),
           end->second.length());
}

void Datagrams::receive(const std::function<void(uint32_t)> &heard) {
  for (int i = 0; i < most_at_once; ++i) {
    Datagram datagram;
    const ssize_t bytes = ::recv(socket_.get(), &datagram, sizeof datagram, MSG_DONTWAIT | MSG_TRUNC);
    if (bytes < 0) return;  // also what a closed port of a peer reports: that peer is silent
    if (bytes != sizeof datagram || std::memcmp(datagram.magic, magic, sizeof magic) != 0) continue;
    if (datagram.node >= numbers_.size() || datagram.to != plan_.node()) continue;
    if (datagram.number <= numbers_[datagram.node]) continue;
    if (!equal(datagram.proof, prove_beat(plan_.secret, label_, datagram))) continue;
    numbers_[datagram.node] = datagram.number;
    heard(datagram.node);
  }
}

}  // namespace fsdp::comm
