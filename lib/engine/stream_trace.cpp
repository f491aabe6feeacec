// SPDX-License-Identifier: Apache-2.0
#include "engine/stream_trace.h"

#include "engine/group.h"

namespace fsdp::engine {

Traced::Traced(const Group &group) noexcept : in_flight(group.flight_name), in_timeline(group.trace_name) {}
Traced::Traced(const Group &group, uint8_t moved) noexcept : Traced(group) { planes = moved; }
Traced::Traced(const GradPart &part) noexcept : in_flight(part.flight_name), in_timeline(part.trace_name) {}

void StreamTrace::record(trace::TimelineEvent event) const noexcept {
  event.begin_ns = begin_ns_;
  event.end_ns = trace::now_ns();
  event.lane = lane_;
  timeline_->record(event);
}

void StreamTrace::await(transport::Versions &versions, uint64_t version, const char *what, const char *object) {
  const bool timed = timeline_ && stream_.runs_tasks();
  if (timed) stream_.run([this] { begin_ns_ = trace::now_ns(); });
  versions.await(version, stream_, what);
  if (!timed) return;
  const trace::TimelineEvent event{"wait for publish",    object, 0, 0, 0, static_cast<uint32_t>(version), 0,
                                   trace::EventKind::wait};
  stream_.run([this, event] { record(event); });
}

// What a graph records has not happened; its replays are the caller's launches.
bool StreamTrace::captured() const { return in_flight_ && stream_.capture_id() != 0; }

void StreamTrace::begin(const char *name, const Traced &of, uint64_t bytes) {
  if (captured()) return;
  handle_ = flights_.enqueue(name, of.in_flight, bytes);
  if (in_flight_) {
    begin_ns_ = trace::now_ns();
    flights_.flight().start(handle_);
    return;
  }
  stream_.run([this, handle = handle_] {
    begin_ns_ = trace::now_ns();
    flights_.flight().start(handle);
  });
}

void StreamTrace::end_of(const char *name, const Traced &of, uint64_t bytes, uint64_t version, const void *comm,
                         Broken broken) {
  if (captured()) return;
  if (in_flight_) {
    const trace::TimelineEvent seen{name,  of.in_timeline,         begin_ns_, 0, bytes, static_cast<uint32_t>(version),
                                    lane_, trace::EventKind::seen, of.planes};
    in_flight_->add(stream_, {handle_, seen, comm, broken});
    return;
  }
  const trace::TimelineEvent event{
      name, of.in_timeline, 0, 0, bytes, static_cast<uint32_t>(version), 0, trace::EventKind::collective, of.planes};
  stream_.run([this, event, handle = handle_, comm, broken] {
    if (comm && broken(comm))
      flights_.flight().fail(handle);
    else
      flights_.flight().complete(handle);
    if (timeline_) record(event);
  });
}

}  // namespace fsdp::engine
