// SPDX-License-Identifier: Apache-2.0
#include "membership/wire/packet.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace fsdp::membership {
namespace {

constexpr size_t control_bytes = CMSG_SPACE(Packet::max_files * sizeof(int));

// Takes the descriptors that arrived with the packet. The kernel has closed those for which there was no room.
void take_files(msghdr &header, Packet &packet) {
  for (cmsghdr *part = CMSG_FIRSTHDR(&header); part; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int file;
      std::memcpy(&file, CMSG_DATA(part) + i * sizeof file, sizeof file);
      Fd owned(file);
      if (packet.file_count < Packet::max_files) packet.files[packet.file_count++] = std::move(owned);
    }
  }
}

void await_event(const Fd &socket, short events, int ms) {
  pollfd entry{socket.get(), events, 0};
  ::poll(&entry, 1, ms);
}

}  // namespace

Sent send_packet(const Fd &socket, const void *data, size_t bytes, std::span<const int> files) {
  alignas(cmsghdr) char control[control_bytes] = {};
  iovec vector{const_cast<void *>(data), bytes};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  if (!files.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(files.size_bytes());
    cmsghdr *part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(files.size_bytes());
    std::memcpy(CMSG_DATA(part), files.data(), files.size_bytes());
  }
  for (;;) {
    if (::sendmsg(socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return Sent::yes;
    if (errno == EINTR) continue;
    // ETOOMANYREFS: too many descriptors of this user are in transit.
    return errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS ? Sent::full : Sent::broken;
  }
}

std::optional<Packet> receive_packet(const Fd &socket) {
  Packet packet;
  alignas(cmsghdr) char control[control_bytes];
  iovec vector{packet.data, sizeof packet.data};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t got;
  // A peer that ends without reading all packets sent to it resets the connection. The kernel reports that once, before
  // the peer's last packets, which can still be read.
  bool reset = false;
  do {
    got = ::recvmsg(socket.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (got < 0) {
    if (!reset && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    return packet;  // the end of the connection
  }
  take_files(header, packet);
  if (!(header.msg_flags & MSG_TRUNC)) packet.bytes = static_cast<size_t>(got);
  return packet;
}

void await_readable(const Fd &socket, int ms) { await_event(socket, POLLIN, ms); }
void await_room(const Fd &socket, int ms) { await_event(socket, POLLOUT, ms); }

uint32_t peer_user(const Fd &socket) noexcept {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return UINT32_MAX;
  return credentials.uid;
}

}  // namespace fsdp::membership
