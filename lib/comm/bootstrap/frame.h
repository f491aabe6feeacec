// SPDX-License-Identifier: Apache-2.0
// What goes over a stream after the handshake: frames of a fixed head and a body that is no longer than the receiver
// allows. Pure functions of bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fsdp::comm {

struct Frame {
  uint32_t kind = 0;  // what the user of the stream calls it
  std::vector<std::byte> body;
};

// Numbers are little-endian.
struct FrameHead {
  static constexpr size_t size_bytes = 16;
  static constexpr uint32_t magic = 0x70647366;  // "fsdp"
  static constexpr uint32_t version = 1;
  uint32_t kind = 0;
  uint32_t body_bytes = 0;
};

// The head and the body.
std::vector<std::byte> write_frame(uint32_t kind, std::span<const std::byte> body);
// Empty, or why these bytes are no head of a frame whose body has at most most_bytes.
std::string read_head(std::span<const std::byte, FrameHead::size_bytes> bytes, uint32_t most_bytes, FrameHead &head);

}  // namespace fsdp::comm
