// SPDX-License-Identifier: Apache-2.0
// What a leader knows of another node: its connection, and for how long it has been silent.
#pragma once

#include <cstdint>
#include <optional>

#include "comm/bootstrap/frame_stream.h"

namespace fsdp::comm {

class NodePeer {
 public:
  NodePeer() = default;  // of this node itself
  explicit NodePeer(FrameStream stream) : stream_(std::move(stream)), live_(true) {}

  FrameStream &stream() noexcept { return stream_; }
  // Neither ended in order nor lost.
  bool live() const noexcept { return live_; }
  void end() noexcept { live_ = false, stream_ = FrameStream(); }
  // The connection is gone for a reason that says nothing of the process at its end.
  void break_connection() noexcept { stream_ = FrameStream(); }

  // -- silence, counted in this rank's own time: see Pulse --
  void heard() noexcept { silent_ms_ = 0; }
  void count(uint32_t elapsed_ms) noexcept;
  uint32_t silent_ms() const noexcept { return silent_ms_; }
  // Everything sent has been acknowledged by the peer's kernel until a moment ago: the network is well.
  bool acknowledges(uint32_t within_ms) const noexcept { return unacknowledged_ms_ < within_ms; }
  bool all_acknowledged() const noexcept { return unacknowledged_ms_ == 0; }

  // What its ranks wait for is not believed for a while after silence: messages to them may be on their way still.
  bool trusted() const noexcept { return doubted_ms_ == 0; }

 private:
  FrameStream stream_;
  bool live_ = false;
  uint32_t silent_ms_ = 0, unacknowledged_ms_ = 0, doubted_ms_ = 0;
};

}  // namespace fsdp::comm
