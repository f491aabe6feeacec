// SPDX-License-Identifier: Apache-2.0
#include "transport/message/tcp/refusals.h"

#include <algorithm>

#include "base/error.h"

namespace fsdp::transport::tcp {

bool Refusals::may_tell(Clock::time_point now) noexcept {
  const auto due = static_cast<uint64_t>(std::max((now - refilled_) / line_time, Clock::duration::rep{0}));
  if (due > 0) {
    lines_left_ = static_cast<uint32_t>(std::min<uint64_t>(lines_at_once, lines_left_ + due));
    refilled_ = now;
  }
  if (lines_left_ == 0) return false;
  --lines_left_;
  return true;
}

void Refusals::note(const std::string &who, const std::string &why, Clock::time_point now) {
  if (!log_) return;
  if (!may_tell(now)) {
    ++untold_;
    return;
  }
  const std::string others = untold_ == 0 ? "" : format_text("; {} others were refused since the last line", untold_);
  untold_ = 0;
  log_(FSDP_LOG_WARNING, format_text("refused a connection for messages from {}: {}{}", who, why, others));
}

}  // namespace fsdp::transport::tcp
