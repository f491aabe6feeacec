// SPDX-License-Identifier: Apache-2.0
#include "comm/nodes/peer.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <algorithm>

namespace fsdp::comm {
namespace {

constexpr uint32_t doubt_after_ms = 1200;  // two heartbeats lost
constexpr uint32_t doubt_ms = 8000;        // TCP's pause after a cut is as long as the cut was

// Bytes that the peer's kernel has not acknowledged.
int unacknowledged(const Fd &socket) noexcept {
  int bytes = 0;
  return ::ioctl(socket.get(), SIOCOUTQ, &bytes) == 0 ? bytes : 1;
}

}  // namespace

void NodePeer::count(uint32_t elapsed_ms) noexcept {
  silent_ms_ += elapsed_ms;
  const bool all = stream_ && !stream_.sending() && unacknowledged(stream_.socket()) == 0;
  unacknowledged_ms_ = all ? 0 : unacknowledged_ms_ + elapsed_ms;
  doubted_ms_ -= std::min(doubted_ms_, elapsed_ms);
  if (silent_ms_ >= doubt_after_ms) doubted_ms_ = doubt_ms;
}

}  // namespace fsdp::comm
