// SPDX-License-Identifier: Apache-2.0
#include "transport/message/tcp/frame.h"

#include <cstddef>

#include "base/crc32c.h"

namespace fsdp::transport::tcp {

using messages::Kind;

uint32_t sum_of(const FrameHead &head) noexcept { return crc32c(0, &head, offsetof(FrameHead, head_sum)); }

void seal(OutFrame &frame) noexcept {
  if (frame.sealed) return;
  frame.head.payload_sum = crc32c(0, frame.payload(), frame.head.payload_bytes);
  frame.head.head_sum = sum_of(frame.head);
  frame.sealed = true;
}

const char *find_misfit(const FrameHead &head, uint32_t from, uint64_t sequence) noexcept {
  const messages::Header &header = head.header;
  if (head.magic != frame_magic || header.magic != messages::header_magic) return "what came is no frame";
  if (head.sequence != sequence) return "a frame is missing, or came twice";
  if (header.from != from) return "a frame of another rank";
  if (header.kind < Kind::call || header.kind > Kind::answer) return "a frame of an unknown kind";
  if (header.kind == Kind::data) return head.payload_bytes == header.bytes ? nullptr : "a chunk of another length";
  return head.payload_bytes <= messages::longest_control ? nullptr : "a frame that is too long";
}

}  // namespace fsdp::transport::tcp
