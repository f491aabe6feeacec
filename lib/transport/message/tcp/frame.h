// SPDX-License-Identifier: Apache-2.0
// What goes over a connection between two ranks once both have proven the job's secret: frames, each a head and its
// payload, in one order.
#pragma once

#include <cstdint>
#include <cstring>

#include "transport/message/channel/wire.h"

namespace fsdp::transport::tcp {

struct FrameHead {
  uint32_t magic;
  uint32_t payload_bytes;
  uint64_t sequence;  // of this direction, from 0
  messages::Header header;
  uint32_t payload_sum;  // CRC32C, where the job has FSDP_NET_CHECKSUM=crc32c; else both are 0
  uint32_t head_sum;     // of all before
};
static_assert(sizeof(FrameHead) == 24 + sizeof(messages::Header));
constexpr uint32_t frame_magic = 0x66736470;

// One on its way out. Data stays where it is; a short payload is kept here.
struct OutFrame {
  FrameHead head;
  alignas(8) std::byte control[messages::longest_control];
  const std::byte *data = nullptr;  // NULL: the payload is in control
  uint64_t sent = 0;                // bytes of head and payload
  bool sealed = false;              // the head has its sums

  const std::byte *payload() const noexcept { return data ? data : control; }
  uint64_t bytes() const noexcept { return sizeof(FrameHead) + head.payload_bytes; }
  bool done() const noexcept { return sent == bytes(); }
};

inline OutFrame make_frame(const messages::Header &header, uint64_t sequence, uint64_t payload_bytes) noexcept {
  OutFrame frame{};
  frame.head = {frame_magic, static_cast<uint32_t>(payload_bytes), sequence, header, 0, 0};
  return frame;
}

// Gives the head the sums of what is there now. Once.
void seal(OutFrame &frame) noexcept;
uint32_t sum_of(const FrameHead &head) noexcept;

// NULL: a peer that keeps to the protocol may send this; else what is wrong with it.
const char *find_misfit(const FrameHead &head, uint32_t from, uint64_t sequence) noexcept;

}  // namespace fsdp::transport::tcp
