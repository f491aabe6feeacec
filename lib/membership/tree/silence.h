// SPDX-License-Identifier: Apache-2.0
// For how long another node has not been heard, counted in this rank's own time: see Pulse.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fsdp::membership {

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

}  // namespace fsdp::membership
