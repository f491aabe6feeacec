// SPDX-License-Identifier: Apache-2.0
#include "trace/span.h"

namespace fsdp::trace {

void Span::begin(EventKind kind, const char *name, const char *object, uint64_t version, uint64_t bytes) noexcept {
  push_range(name, object);
  event_ = {name, object, now_ns(), 0, bytes, static_cast<uint32_t>(version), caller_lane, kind};
}

void Span::end() noexcept {
  event_.end_ns = now_ns();
  timeline_->record(event_);
  pop_range();
}

}  // namespace fsdp::trace
