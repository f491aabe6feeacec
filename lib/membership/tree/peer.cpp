// SPDX-License-Identifier: Apache-2.0

#include "membership/tree/peer.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

namespace fsdp::membership {

namespace {

// Bytes that the peer's kernel has not acknowledged.
int unacknowledged(const Fd &socket) noexcept {
  int bytes = 0;
  return ::ioctl(socket.get(), SIOCOUTQ, &bytes) == 0 ? bytes : 1;
}

}  // namespace

void NodePeer::count(uint32_t elapsed_ms, uint32_t beat_ms) noexcept {
  silence_.count(elapsed_ms, beat_ms);
  const bool all = stream_ && !stream_.sending() && unacknowledged(stream_.socket()) == 0;
  unacknowledged_ms_ = all ? 0 : unacknowledged_ms_ + elapsed_ms;
}

}  // namespace fsdp::membership
