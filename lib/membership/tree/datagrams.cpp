// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/datagrams.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>

#include "membership/wire/secret.h"

namespace fsdp::membership {
namespace {

constexpr size_t max_in_batch = 64;
constexpr int max_batches = 128;              // limit for one round
constexpr uint32_t many_useless = 32;         // in one round; a network alone repeats fewer
constexpr int wanted_buffer_bytes = 4 << 20;  // the kernel grants what its limit allows (net.core.rmem_max)
constexpr uint32_t udp_header_bytes = 8;

enum class DatagramKind : uint32_t { beat = 1, dump };
struct Datagram {
  DatagramMark mark;
  uint32_t node;  // the sender's node
  DatagramKind kind;
  uint64_t number;
  Digest proof;
};

std::string beat_label(const NodePlan &plan) { return "libfsdp beat " + plan.job; }
std::string dump_label(const NodePlan &plan) { return "libfsdp core dump " + plan.job; }

DatagramMark mark_for(const NodePlan &plan, uint32_t node) {
  uint8_t said[4];
  std::memcpy(said, &node, sizeof node);
  const Digest digest = authenticate(plan.secret, "libfsdp datagram " + plan.job, {said});
  DatagramMark mark;
  std::memcpy(mark.data(), digest.data(), mark.size());
  return mark;
}

DatagramTarget target_of(const NodePlan &plan, uint32_t node) {
  return {parse_address(plan.nodes[node].address), mark_for(plan, node)};
}

Digest prove_datagram(std::string_view secret, const std::string &label, uint32_t node, const DatagramMark &mark,
                      uint64_t number) {
  uint8_t said[20];
  std::memcpy(said, mark.data(), 8);
  std::memcpy(said + 8, &node, 4);
  std::memcpy(said + 12, &number, 8);
  return authenticate(secret, label, {said});
}

void send_datagram(const Fd &socket, const DatagramTarget &to, Datagram datagram, std::string_view secret,
                   const std::string &label) {
  datagram.mark = to.mark;
  datagram.proof = prove_datagram(secret, label, datagram.node, to.mark, datagram.number);
  ::sendto(socket.get(), &datagram, sizeof datagram, MSG_NOSIGNAL | MSG_DONTWAIT, to.end.get(), to.end.length());
}

// The kernel runs this program on each datagram, including the header. A kernel without socket filters (gVisor) refuses
// the program; in that case receive() itself reads and drops the datagrams of strangers.
void accept_only(const Fd &socket, const DatagramMark &mark) noexcept {
  uint32_t words[2];
  std::memcpy(words, mark.data(), sizeof words);
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, udp_header_bytes + sizeof(Datagram), 0, 5),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, udp_header_bytes),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(words[0]), 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, udp_header_bytes + 4),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(words[1]), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, UINT32_MAX),
      BPF_STMT(BPF_RET | BPF_K, 0),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter);
}

}  // namespace

struct Datagrams::Batch {
  Batch() {
    for (size_t i = 0; i < max_in_batch; ++i) {
      parts[i] = {&bytes[i], sizeof bytes[i]};
      heads[i].msg_hdr.msg_iov = &parts[i];
      heads[i].msg_hdr.msg_iovlen = 1;
    }
  }
  int receive(const Fd &socket) { return ::recvmmsg(socket.get(), heads, max_in_batch, MSG_DONTWAIT, nullptr); }

  std::byte bytes[max_in_batch][sizeof(Datagram) + 1];  // the extra byte shows that a datagram is too long
  iovec parts[max_in_batch];
  mmsghdr heads[max_in_batch] = {};
};

Datagrams::Datagrams(const NodePlan &plan, Fd socket)
    : plan_(plan),
      socket_(std::move(socket)),
      mark_(mark_for(plan, plan.node())),
      label_(beat_label(plan)),
      dump_label_(dump_label(plan)),
      numbers_(plan.nodes.size()) {
  accept_only(socket_, mark_);
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &wanted_buffer_bytes, sizeof wanted_buffer_bytes);
}

void Datagrams::beat(uint32_t node, uint64_t number) {
  auto target = targets_.find(node);
  if (target == targets_.end()) target = targets_.emplace(node, target_of(plan_, node)).first;
  send_datagram(socket_, target->second, {{}, plan_.node(), DatagramKind::beat, number, {}}, plan_.secret, label_);
}

void Datagrams::receive(const std::function<void(uint32_t)> &heard,
                        const std::function<void(uint32_t, int32_t)> &dumping) {
  Batch batch;
  uint32_t useless = 0;
  for (int i = 0; i < max_batches; ++i) {
    const int count = batch.receive(socket_);  // also below 0 if a peer's port is closed; the peer is then silent
    for (int n = 0; n < count; ++n) useless += !take(batch.bytes[n], batch.heads[n].msg_len, heard, dumping);
    if (count < static_cast<int>(max_in_batch)) break;
  }
  flooded_ = useless >= many_useless;
}

// Makes the cheap checks first. Returns false if the datagram is useless.
bool Datagrams::take(const void *bytes, size_t size, const std::function<void(uint32_t)> &heard,
                     const std::function<void(uint32_t, int32_t)> &dumping) {
  Datagram datagram;
  if (size != sizeof datagram) return false;
  std::memcpy(&datagram, bytes, sizeof datagram);
  const bool dump = datagram.kind == DatagramKind::dump;
  if (datagram.mark != mark_ || datagram.node >= numbers_.size()) return false;
  if (!dump && (datagram.kind != DatagramKind::beat || datagram.number <= numbers_[datagram.node])) return false;
  const Digest proof = prove_datagram(plan_.secret, dump ? dump_label_ : label_, datagram.node, mark_, datagram.number);
  if (!equal(datagram.proof, proof)) return false;
  if (dump) {
    dumping(datagram.node, static_cast<int32_t>(datagram.number));
    return true;
  }
  numbers_[datagram.node] = datagram.number;
  heard(datagram.node);
  return true;
}

DumpNotices::DumpNotices(const NodePlan &plan) : node_(plan.node()), secret_(plan.secret), label_(dump_label(plan)) {
  for (const uint32_t child : plan.children()) targets_.emplace(child, target_of(plan, child));
  if (plan.has_parent()) targets_.emplace(plan.parent(), target_of(plan, plan.parent()));
}

void DumpNotices::send(int32_t process) const {
  for (const auto &[node, to] : targets_) {
    const Fd socket(::socket(to.end.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const auto number = static_cast<uint64_t>(static_cast<uint32_t>(process));
    if (socket) send_datagram(socket, to, {{}, node_, DatagramKind::dump, number, {}}, secret_, label_);
  }
}

}  // namespace fsdp::membership
