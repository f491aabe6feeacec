// SPDX-License-Identifier: Apache-2.0
// The frames of a stream after the handshake. A frame is a head of fixed size, a body no longer than the receiver
// allows, and a tag made with the keys of the handshake. Pure functions of bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "membership/wire/secret.h"

namespace fsdp::membership {

struct Frame {
  uint32_t kind = 0;  // chosen by the user of the stream
  std::vector<std::byte> body;
};

// Numbers are little-endian.
struct FrameHead {
  static constexpr size_t size_bytes = 16;
  static constexpr uint32_t magic = 0x70647366;  // "fsdp"
  static constexpr uint32_t version = 2;
  uint32_t kind = 0;
  uint32_t body_bytes = 0;
};

// A frame in the form in which it is sent, stored once for all streams that send it; each stream adds a tag of its own.
struct WholeFrame {
  std::vector<std::byte> bytes;  // the head and the body
  Digest body;                   // the digest of the body

  std::span<const std::byte, FrameHead::size_bytes> head() const {
    return std::span(bytes).first<FrameHead::size_bytes>();
  }
};
using SharedFrame = std::shared_ptr<const WholeFrame>;

// Returns the bytes of the head and the body.
std::vector<std::byte> write_frame(uint32_t kind, std::span<const std::byte> body);
SharedFrame share_frame(std::vector<std::byte> bytes);
// Reads a head. Returns an empty text, or says why the bytes are not the head of a frame whose body has at most
// max_bytes.
std::string read_head(std::span<const std::byte, FrameHead::size_bytes> bytes, uint32_t max_bytes, FrameHead &head);

}  // namespace fsdp::membership
