// SPDX-License-Identifier: Apache-2.0

#include "engine/runtime/stream_trace.h"

#include <algorithm>

#include "engine/runtime/group.h"

namespace fsdp::engine {

InFlight::InFlight(Context &context) : context_(context), entries_(max_entries) {
  for (Mark &mark : marks_) mark.event = context.device().create_event();
  context.flight_log().add_unsettled(this);
}

InFlight::~InFlight() { context_.flight_log().remove_unsettled(this); }

void InFlight::add(device::Stream &stream, const Tracked &entry) {
  settle();
  const std::lock_guard lock(mutex_);
  if (next_entry_ - first_entry_ == max_entries)
    ++first_entry_;  // drops an entry that the recorder has lost, too, or will lose soon
  entries_[next_entry_++ % max_entries] = entry;
  // If all marks are in use, the last one is used again.
  if (next_mark_ - first_mark_ < max_marks) ++next_mark_;
  Mark &mark = marks_[(next_mark_ - 1) % max_marks];
  stream.record(*mark.event);
  mark.end = next_entry_;
}

void InFlight::settle() noexcept {
  const std::lock_guard lock(mutex_);
  for (; first_mark_ < next_mark_; ++first_mark_) {
    const Mark &mark = marks_[first_mark_ % max_marks];
    if (!mark.event->done() || context_.failure().failed()) return;
    for (; first_entry_ < mark.end; ++first_entry_) complete(entries_[first_entry_ % max_entries]);
  }
}

// Work begins no earlier than the end of the work in front of it on the same stream.
void InFlight::complete(const Tracked &entry) noexcept {
  if (entry.comm && entry.broken(entry.comm))
    context_.flight().fail(entry.handle);
  else
    context_.flight().complete(entry.handle);
  trace::TimelineEvent event = entry.event;
  event.begin_ns = std::max(event.begin_ns, last_end_ns_);
  last_end_ns_ = event.end_ns = std::max(trace::now_ns(), event.begin_ns);
  if (context_.timeline()) context_.timeline()->record(event);
}

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

// Is the stream being captured? A capture only records work, and later the caller launches the replays.
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
