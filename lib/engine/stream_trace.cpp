// SPDX-License-Identifier: Apache-2.0
#include "engine/stream_trace.h"

namespace fsdp::engine {

void StreamTrace::record(trace::Event event) const noexcept {
  event.begin_ns = begin_ns_;
  event.end_ns = trace::now_ns();
  event.lane = lane_;
  timeline_->record(event);
}

void StreamTrace::await(comm::Gate &gate, uint64_t value, const char *what, const char *name, const char *object,
                        uint64_t version) {
  begin();
  stream_.run([gate = &gate, value, what] { gate->await(value, what); });
  if (!timeline_) return;
  const trace::Event event{name, object, 0, 0, 0, static_cast<uint32_t>(version), 0, trace::Kind::wait};
  stream_.run([this, event] { record(event); });
}

void StreamTrace::begin() {
  if (timeline_) stream_.run([this] { begin_ns_ = trace::now_ns(); });
}

void StreamTrace::end(const char *name, const char *object, uint64_t bytes, uint64_t version) {
  if (!timeline_) return;
  const trace::Event event{name, object, 0, 0, bytes, static_cast<uint32_t>(version), 0, trace::Kind::collective};
  stream_.run([this, event] { record(event); });
}

}  // namespace fsdp::engine
