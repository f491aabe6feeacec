// SPDX-License-Identifier: Apache-2.0
// The memory for sums of messages between hosts: apart from the backend, since a context that only plans counts it too.
#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "comm/net.h"

namespace fsdp::comm {
namespace {

constexpr uint64_t default_chunk_bytes = uint64_t{1} << 20;
constexpr uint64_t least_chunk_bytes = uint64_t{4} << 10, most_chunk_bytes = uint64_t{64} << 20;
// Many hosts get smaller chunks instead of more memory.
constexpr uint64_t most_scratch_bytes = uint64_t{64} << 20;

// As many chunks of every rank as may be ahead.
uint64_t net_scratch_of(uint32_t ranks, uint64_t chunk_bytes) noexcept { return net_window * ranks * chunk_bytes; }

}  // namespace

uint64_t read_net_chunk_bytes() {
  const char *text = std::getenv("FSDP_UCX_CHUNK_BYTES");
  if (!text || !*text) return default_chunk_bytes;
  char *end = nullptr;
  const unsigned long long bytes = std::strtoull(text, &end, 10);
  if (*end || *text < '0' || *text > '9' || bytes < least_chunk_bytes || bytes > most_chunk_bytes || bytes % 64)
    fail(FSDP_INVALID_ARGUMENT, "FSDP_UCX_CHUNK_BYTES is '{}': a multiple of 64 in [{}, {}] is needed", text,
         least_chunk_bytes, most_chunk_bytes);
  return bytes;
}

uint64_t net_chunk_bytes(uint32_t ranks, uint64_t largest) noexcept {
  const uint64_t share = most_scratch_bytes / net_scratch_of(std::max(ranks, 1U), 64) * 64;
  return std::max(least_chunk_bytes, std::min(largest, share));
}

uint64_t net_scratch_bytes(uint32_t ranks, uint64_t largest) noexcept {
  return net_scratch_of(ranks, net_chunk_bytes(ranks, largest));
}

}  // namespace fsdp::comm
