// SPDX-License-Identifier: Apache-2.0
// The memory for sums of messages between hosts. It is computed without a backend, because a context that only plans
// needs it, too.
#include "transport/net.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "base/error.h"
#include "base/settings.h"
#include "transport/call/launch.h"

namespace fsdp::transport {

namespace {

// A chunk with its headers fits into one piece that UCX sends over TCP, and into the caches of both sides.
constexpr uint64_t default_chunk_bytes = uint64_t{60} << 10;
constexpr uint64_t least_chunk_bytes = uint64_t{4} << 10, max_chunk_bytes = uint64_t{64} << 20;
// The memory does not grow further if there are many hosts, which get fewer and smaller chunks instead.
constexpr uint64_t places_of_a_rank = uint64_t{2} << 20, places_of_all = uint64_t{64} << 20;
// The limit for what a rank sends to all others in one short call.
constexpr uint64_t short_bytes_to_all = uint64_t{64} << 10;
constexpr uint64_t least_window = 4, max_window = 64;

}  // namespace

uint64_t read_net_chunk_bytes() {
  const char *text = setting("FSDP_NET_CHUNK_BYTES");
  if (!text || !*text) return default_chunk_bytes;
  char *end = nullptr;
  const unsigned long long bytes = std::strtoull(text, &end, 10);
  if (*end || *text < '0' || *text > '9' || bytes < least_chunk_bytes || bytes > max_chunk_bytes || bytes % 64)
    fail(FSDP_INVALID_ARGUMENT, "FSDP_NET_CHUNK_BYTES is '{}': a multiple of 64 in [{}, {}] is needed", text,
         least_chunk_bytes, max_chunk_bytes);
  return bytes;
}

uint64_t net_window(uint32_t ranks, uint64_t chunk_bytes) noexcept {
  const uint64_t places = std::min(places_of_a_rank, places_of_all / std::max(ranks, 1U));
  return std::clamp(places / chunk_bytes, least_window, max_window);
}

uint64_t net_chunk_bytes(uint32_t ranks, uint64_t largest) noexcept {
  const uint64_t share = places_of_all / (least_window * std::max(ranks, 1U)) / 64 * 64;
  return std::max(least_chunk_bytes, std::min(largest, share));
}

uint64_t net_short_bytes(uint32_t ranks) noexcept { return short_bytes_to_all / std::max(ranks - 1, 1U) / 64 * 64; }

uint64_t net_box_bytes(uint64_t short_bytes) noexcept {
  return short_bytes ? (sizeof(Fingerprint) + short_bytes + 63) / 64 * 64 : 0;
}

uint64_t net_boxes_bytes(uint32_t ranks, uint64_t short_bytes) noexcept {
  return 2 * ranks * net_box_bytes(short_bytes);
}

uint64_t net_scratch_bytes(uint32_t ranks, uint64_t largest) noexcept {
  const uint64_t chunk = net_chunk_bytes(ranks, largest);
  return net_window(ranks, chunk) * ranks * chunk + net_boxes_bytes(ranks, net_short_bytes(ranks));
}

Descriptors count_descriptors() {
  Descriptors count;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) fail_errno(errno, "getrlimit of descriptors");
  count.limit = static_cast<uint32_t>(std::min<rlim_t>(limit.rlim_cur, UINT32_MAX));
  const std::unique_ptr<DIR, int (*)(DIR *)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (!folder) {  // without /proc only the limit is known; or no descriptor is left for the folder
    if (errno == EMFILE || errno == ENFILE) count.open = count.limit;
    return count;
  }
  while (::readdir(folder.get())) ++count.open;
  count.open -= std::min(count.open, 3U);  // ".", ".." and the folder
  return count;
}

uint64_t DescriptorNeed::all() const noexcept { return uint64_t{control} + messages + spare_descriptors; }

std::string find_shortage(const Descriptors &has, const DescriptorNeed &need) {
  if (has.open + need.all() <= has.limit) return {};
  return format_text(
      "it needs {} more descriptors ({} for connections to the leaders of other hosts, {} for messages to ranks of "
      "other hosts, {} to spare), but its process may have {} and has {}: raise the limit to {} or more (ulimit -n; "
      "systemd: LimitNOFILE=; containers: --ulimit nofile=)",
      need.all(), need.control, need.messages, spare_descriptors, has.limit, has.open, has.open + need.all());
}

}  // namespace fsdp::transport
