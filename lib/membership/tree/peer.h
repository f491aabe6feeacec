// SPDX-License-Identifier: Apache-2.0
// What a leader knows of another node that it has a connection with.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/fd.h"
#include "membership/wire/frame_stream.h"

namespace fsdp::membership {

// For how long another node has not been heard, counted in this rank's own time: see Pulse.

class Silence {
 public:
  void heard() noexcept { ms_ = 0, begun_ = true; }
  // It has been heard at all. Before, its leader may not have come so far.
  bool begun() const noexcept { return begun_; }
  // beat_ms: how often it says that it lives.
  void count(uint32_t elapsed_ms, uint32_t beat_ms) noexcept {
    ms_ += elapsed_ms;
    doubted_ms_ -= std::min(doubted_ms_, elapsed_ms);
    if (begun_ && ms_ >= doubt_after_ms(beat_ms)) doubted_ms_ = doubt_ms;
  }
  uint32_t ms() const noexcept { return ms_; }
  // What its ranks wait for is not believed for a while after silence: messages to them may be on their way still.
  bool trusted() const noexcept { return doubted_ms_ == 0; }

 private:
  // Two heartbeats lost. Circles of callers are looked at for longer before they are one.
  static constexpr uint32_t doubt_after_ms(uint32_t beat_ms) { return std::max(1200u, beat_ms * 12 / 5); }
  static constexpr uint32_t doubt_ms = 8000;  // TCP's pause after a cut is as long as the cut was
  uint32_t ms_ = 0, doubted_ms_ = 0;
  bool begun_ = false;
};

class NodePeer {
 public:
  enum class Relation {
    parent,
    child,
    refuge,  // this leader has lost its way to the root, and has turned to that one
    refugee  // ... that one has, and to this one
  };

  NodePeer(Relation role, FrameStream stream)
      : role_(role), stream_(std::move(stream)), fork_closed_(stream_.socket().get()) {}

  Relation role() const noexcept { return role_; }
  bool in_tree() const noexcept { return role_ == Relation::parent || role_ == Relation::child; }
  // On the way to the root, or in the place of what was.
  bool above() const noexcept { return role_ == Relation::parent || role_ == Relation::refuge; }
  FrameStream &stream() noexcept { return stream_; }
  const FrameStream &stream() const noexcept { return stream_; }
  // Neither ended in order nor lost.
  bool live() const noexcept { return live_; }
  void end() noexcept { live_ = false, break_connection(); }
  void leave() noexcept { end(), left_ = true; }
  bool left() const noexcept { return left_; }  // in order
  // The connection is gone for a reason that says nothing of the process at its end.
  void break_connection() noexcept {
    fork_closed_ = ForkClosed();
    stream_ = FrameStream();
  }
  // Nothing that comes over the connection can be believed any more.
  void blame() noexcept { blamed_ = true; }
  bool blamed() const noexcept { return blamed_; }

  void heard() noexcept { silence_.heard(), waits_bytes_ = 0; }
  // May so much be said of what ranks wait for? It goes on and on, and would fill the buffers of a leader that is
  // stopped: its kernel would acknowledge nothing more, and it would be taken for one behind a cut network.
  bool take_waits(uint64_t bytes) noexcept {
    if (waits_bytes_ + bytes > most_waits_bytes) return false;
    waits_bytes_ += bytes;
    return true;
  }
  void count(uint32_t elapsed_ms, uint32_t beat_ms) noexcept;
  const Silence &silence() const noexcept { return silence_; }
  // Everything sent has been acknowledged by the peer's kernel until a moment ago: the network is well.
  bool acknowledges(uint32_t within_ms) const noexcept { return unacknowledged_ms_ < within_ms; }
  bool all_acknowledged() const noexcept { return unacknowledged_ms_ == 0; }

 private:
  static constexpr uint64_t most_waits_bytes = 32 * 1024;  // since it was heard; a kernel has room for twice as much

  Relation role_;
  FrameStream stream_;
  ForkClosed fork_closed_;  // its end tells of this process's
  bool live_ = true, left_ = false, blamed_ = false;
  Silence silence_;
  uint32_t unacknowledged_ms_ = 0;
  uint64_t waits_bytes_ = 0;
};

}  // namespace fsdp::membership
