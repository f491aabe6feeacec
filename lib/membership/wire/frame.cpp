// SPDX-License-Identifier: Apache-2.0
#include "membership/wire/frame.h"

#include <bit>
#include <cstring>

#include "base/error.h"

namespace fsdp::membership {

static_assert(std::endian::native == std::endian::little);

std::vector<std::byte> write_frame(uint32_t kind, std::span<const std::byte> body) {
  const uint32_t head[] = {FrameHead::magic, FrameHead::version, kind, static_cast<uint32_t>(body.size())};
  static_assert(sizeof head == FrameHead::size_bytes);
  std::vector<std::byte> bytes(sizeof head + body.size());
  std::memcpy(bytes.data(), head, sizeof head);
  if (!body.empty()) std::memcpy(bytes.data() + sizeof head, body.data(), body.size());
  return bytes;
}

SharedFrame share_frame(std::vector<std::byte> bytes) {
  const Digest body = digest_of(std::span(bytes).subspan(FrameHead::size_bytes));
  return std::make_shared<const WholeFrame>(WholeFrame{std::move(bytes), body});
}

std::string read_head(std::span<const std::byte, FrameHead::size_bytes> bytes, uint32_t max_bytes, FrameHead &head) {
  uint32_t words[4];
  std::memcpy(words, bytes.data(), sizeof words);
  if (words[0] != FrameHead::magic) return "a frame does not start as one of libfsdp";
  if (words[1] != FrameHead::version)
    return format_text("a frame has version {}, expected is version {}", words[1], FrameHead::version);
  if (words[3] > max_bytes)
    return format_text("a frame announces {} bytes, at most {} are allowed", words[3], max_bytes);
  head = {words[2], words[3]};
  return {};
}

}  // namespace fsdp::membership
