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
constexpr char beat_magic[8] = {'f', 's', 'd', 'p', 'b', 'e', 'a', 't'};
constexpr char dump_magic[8] = {'f', 's', 'd', 'p', 'c', 'o', 'r', 'e'};

bool begins_with(const Datagram &datagram, const char (&magic)[8]) {
  return std::memcmp(datagram.magic, magic, sizeof magic) == 0;
}

std::string beat_label(const NodePlan &plan) { return "libfsdp beat " + plan.job; }
std::string dump_label(const NodePlan &plan) { return "libfsdp core dump " + plan.job; }

Digest prove_datagram(const std::string &secret, const std::string &label, const Datagram &datagram) {
  uint8_t said[16];
  std::memcpy(said, &datagram.node, 4);
  std::memcpy(said + 4, &datagram.to, 4);
  std::memcpy(said + 8, &datagram.number, 8);
  return authenticate(secret, label, {said});
}

Datagram make_datagram(const char (&magic)[8], uint32_t node, uint32_t to, uint64_t number, const std::string &secret,
                       const std::string &label) {
  Datagram datagram{};
  std::memcpy(datagram.magic, magic, sizeof magic);
  datagram.node = node;
  datagram.to = to;
  datagram.number = number;
  datagram.proof = prove_datagram(secret, label, datagram);
  return datagram;
}

void send_datagram(const Fd &socket, const Datagram &datagram, const Endpoint &to) noexcept {
  ::sendto(socket.get(), &datagram, sizeof datagram, MSG_NOSIGNAL | MSG_DONTWAIT, to.get(), to.length());
}

}  // namespace

Datagrams::Datagrams(const NodePlan &plan, Fd socket)
    : plan_(plan),
      socket_(std::move(socket)),
      label_(beat_label(plan)),
      dump_label_(dump_label(plan)),
      numbers_(plan.nodes.size()) {}

void Datagrams::beat(uint32_t node, uint64_t number) {
  auto end = ends_.find(node);
  if (end == ends_.end()) end = ends_.emplace(node, parse_address(plan_.nodes[node].address)).first;
  send_datagram(socket_, make_datagram(beat_magic, plan_.node(), node, number, plan_.secret, label_), end->second);
}

void Datagrams::receive(const std::function<void(uint32_t)> &heard,
                        const std::function<void(uint32_t, int32_t)> &dumping) {
  for (int i = 0; i < most_at_once; ++i) {
    Datagram datagram;
    const ssize_t bytes = ::recv(socket_.get(), &datagram, sizeof datagram, MSG_DONTWAIT | MSG_TRUNC);
    if (bytes < 0) return;  // also what a closed port of a peer reports: that peer is silent
    if (bytes != sizeof datagram) continue;
    if (datagram.node >= numbers_.size() || datagram.to != plan_.node()) continue;
    const bool dump = begins_with(datagram, dump_magic);
    if (!dump && (!begins_with(datagram, beat_magic) || datagram.number <= numbers_[datagram.node])) continue;
    if (!equal(datagram.proof, prove_datagram(plan_.secret, dump ? dump_label_ : label_, datagram))) continue;
    if (dump) {
      dumping(datagram.node, static_cast<int32_t>(datagram.number));
      continue;
    }
    numbers_[datagram.node] = datagram.number;
    heard(datagram.node);
  }
}

DumpNotices::DumpNotices(const NodePlan &plan) : node_(plan.node()), secret_(plan.secret), label_(dump_label(plan)) {
  const auto add = [&](uint32_t node) { ends_.emplace(node, parse_address(plan.nodes[node].address)); };
  for (const uint32_t child : plan.children()) add(child);
  if (plan.has_parent()) add(plan.parent());
}

void DumpNotices::send(int32_t process) const {
  for (const auto &[to, end] : ends_) {
    const Datagram datagram = make_datagram(dump_magic, node_, to, static_cast<uint32_t>(process), secret_, label_);
    const Fd socket(::socket(end.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (socket) send_datagram(socket, datagram, end);
  }
}

}  // namespace fsdp::comm
