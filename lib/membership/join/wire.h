// SPDX-License-Identifier: Apache-2.0
// The messages of the bootstrap: fixed layouts, one packet each, checked for size, magic, version and kind before use.
//
//   rank 0 -> rank r   Challenge         at once
//   r -> 0             Answer            proves the secret over both nonces
//   0 -> r             Proof             so does rank 0; only now is anything else read
//   r -> 0             Join              with r's pidfd and the way into its mailbox; or Refusal: r cannot join
//   0 -> r             Refusal, or when all have joined: one Peer a rank, with its descriptors, and Start
#pragma once

#include <cstdint>
#include <string_view>

#include "membership/wire/handshake.h"

namespace fsdp::membership::wire {

struct JoinPacket {
  static constexpr PacketKind kind = PacketKind::join;
  PacketHead head;
  uint32_t rank, world_size;
  uint32_t wire_version;
  char library[28];  // as much of it as there is room for
};
struct RefusalPacket {
  static constexpr PacketKind kind = PacketKind::refusal;
  PacketHead head;
  int32_t status, rank;
  char text[480];
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
inline RefusalPacket make_refusal(int32_t status, int32_t rank, std::string_view text) {
  auto refusal = make<RefusalPacket>();
  refusal.status = status;
  refusal.rank = rank;
  text.copy(refusal.text, sizeof refusal.text - 1);
  return refusal;
}

}  // namespace fsdp::membership::wire
