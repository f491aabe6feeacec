// SPDX-License-Identifier: Apache-2.0
// Packets with descriptors over unix sockets of type SEQPACKET. Never raises SIGPIPE; received descriptors are closed
// on exec.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/fd.h"
#include "membership/wire/handshake.h"

namespace fsdp::membership {

enum class Sent { yes, full, broken };

Sent send_packet(const Fd &socket, const void *data, size_t bytes, std::span<const int> files = {});

// One packet. `bytes` is 0 at the end of the connection, or if the packet is too long for any message.
struct Packet {
  static constexpr size_t max_files = 2;
  size_t bytes = 0;
  std::byte data[wire::longest];
  Fd files[max_files];
  size_t file_count = 0;

  // The message, if the packet is exactly one of this type and version.
  template <class M>
  std::optional<M> as() const {
    M message;
    if (bytes != sizeof(M)) return {};
    std::memcpy(&message, data, sizeof(M));
    if (std::memcmp(message.head.magic, wire::magic, sizeof wire::magic) != 0) return {};
    if (message.head.version != wire::version || message.head.kind != M::kind) return {};
    return message;
  }
};

// Returns nothing if no packet has arrived yet.
std::optional<Packet> receive_packet(const Fd &socket);

// Sleeps until the socket has something to read or is closed, at most `ms`. await_room() waits for room to send.
void await_readable(const Fd &socket, int ms);
void await_room(const Fd &socket, int ms);

// The user at the other end; all bits are set if the kernel does not tell.
uint32_t peer_user(const Fd &socket) noexcept;

}  // namespace fsdp::membership
