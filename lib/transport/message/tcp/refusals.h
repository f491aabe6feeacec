// SPDX-License-Identifier: Apache-2.0
// Lines for the log of whom this rank has refused, and why. Who knocks without end fills no log: after a few lines
// there is one in ten seconds, which says how many had none.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "transport/net.h"

namespace fsdp::transport::tcp {

class Refusals {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t lines_at_once = 8;
  static constexpr auto line_time = std::chrono::seconds(10);

  void set_log(NetLog log) { log_ = std::move(log); }
  void note(const std::string &who, const std::string &why, Clock::time_point now);

 private:
  bool may_tell(Clock::time_point now) noexcept;

  NetLog log_;
  uint32_t lines_left_ = lines_at_once;
  Clock::time_point refilled_{};
  uint64_t untold_ = 0;
};

}  // namespace fsdp::transport::tcp
