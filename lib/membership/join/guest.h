// SPDX-License-Identifier: Apache-2.0
// How a rank joins the leader of its host, which is the lowest rank of the host: it finds the leader, proves the
// secret, joins, and waits for the start.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "membership/job.h"
#include "membership/join/rank_links.h"
#include "membership/join/rendezvous.h"
#include "membership/verdict.h"
#include "membership/wire/handshake.h"
#include "membership/wire/packet.h"
#include "membership/wire/secret.h"

namespace fsdp::membership::wire {

// The messages of the bootstrap: fixed layouts, one packet each, checked for size, magic, version and kind before use.
//
//   leader -> rank r   Challenge         at once
//   r -> leader        Answer            proves r's secret over both nonces
//   leader -> r        Proof             proves the leader's secret; only after that is anything else read
//   r -> leader        Join              with r's pidfd and the sending end of its mailbox; or Report: r cannot join
//   leader -> r        Refused or Verdict, or when all have joined: one Peer per rank, with its descriptors, and Start

struct JoinPacket {
  static constexpr PacketKind kind = PacketKind::join;
  PacketHead head;
  uint32_t rank, world_size;
  uint32_t wire_version;
  WireText<28> library;  // the version, cut at the end if it is too long
};
// Has the same form in all versions of the library, as Join does, so that a rank with another version can read why it
// was refused.
struct RefusedPacket {
  static constexpr PacketKind kind = PacketKind::refused;
  PacketHead head;
  int32_t status, rank;
  WireText<480> text;
};
struct ReportPacket {
  static constexpr PacketKind kind = PacketKind::report;
  PacketHead head;
  Report report;
};
struct VerdictPacket {
  static constexpr PacketKind kind = PacketKind::verdict;
  PacketHead head;
  Verdict verdict;
};
struct PeerPacket {
  static constexpr PacketKind kind = PacketKind::peer;
  PacketHead head;
  uint32_t rank, world_size;
};
struct StartPacket {
  static constexpr PacketKind kind = PacketKind::start;
  PacketHead head;
};
inline RefusedPacket make_refused(int32_t status, int32_t rank, std::string_view text) {
  auto refused = make<RefusedPacket>();
  refused.status = status;
  refused.rank = rank;
  refused.text.set(text);
  return refused;
}

}  // namespace fsdp::membership::wire

namespace fsdp::membership {

// The address of a rendezvous on one host: an abstract unix socket, which ends when the listening process ends.

class Address {
 public:
  explicit Address(const WorldOptions &options) {
    const std::string name = socket_name(options.rendezvous, options.secret, ::geteuid());
    address_.sun_family = AF_UNIX;
    std::memcpy(address_.sun_path + 1, name.data(), name.size());  // after the NUL that marks an abstract name
    length_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr *get() const noexcept { return reinterpret_cast<const sockaddr *>(&address_); }
  socklen_t length() const noexcept { return length_; }

 private:
  sockaddr_un address_{};
  socklen_t length_;
};

class Visit {
 public:
  // `ranks`: the ranks of this host, in order. If the job is on one host, these are all ranks.
  Visit(const WorldOptions &options, std::span<const uint32_t> ranks, const Waiter &waiter);
  Rendezvous run();

 private:
  using Clock = std::chrono::steady_clock;
  bool connect();
  bool authenticate();  // false: this rank must try again
  // Returns the next packet; it has 0 bytes at the end of the connection. Throws at the deadline.
  Packet hear(Clock::time_point deadline, const char *waiting_for);
  void open_descriptors();
  void join();
  Rendezvous await_start();
  void throw_ending(const Packet &packet) const;  // throws the error of a Verdict or Refused; ignores other packets
  void pause();

  const WorldOptions &options_;
  const size_t rank_count_;  // number of ranks of this host
  const int32_t leader_;
  const Waiter &waiter_;
  Clock::time_point deadline_;
  std::string last_problem_;
  Fd socket_;
  RankDescriptors descriptors_;
};

}  // namespace fsdp::membership
