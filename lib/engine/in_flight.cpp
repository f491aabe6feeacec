// SPDX-License-Identifier: Apache-2.0
#include "engine/in_flight.h"

#include <algorithm>

namespace fsdp::engine {

InFlight::InFlight(Context &context) : context_(context), entries_(most_entries) {
  for (Mark &mark : marks_) mark.event = context.device().create_event();
  context.add_unsettled(this);
}

InFlight::~InFlight() { context_.remove_unsettled(this); }

void InFlight::add(device::Stream &stream, const Tracked &entry) {
  settle();
  const std::lock_guard lock(mutex_);
  if (next_entry_ - first_entry_ == most_entries)
    ++first_entry_;  // forgotten: the recorder has lost it too, or will soon
  entries_[next_entry_++ % most_entries] = entry;
  // With all marks in use the last one moves on.
  if (next_mark_ - first_mark_ < most_marks) ++next_mark_;
  Mark &mark = marks_[(next_mark_ - 1) % most_marks];
  stream.record(*mark.event);
  mark.end = next_entry_;
}

void InFlight::settle() noexcept {
  const std::lock_guard lock(mutex_);
  for (; first_mark_ < next_mark_; ++first_mark_) {
    const Mark &mark = marks_[first_mark_ % most_marks];
    if (!mark.event->done() || context_.failure().failed()) return;
    for (; first_entry_ < mark.end; ++first_entry_) complete(entries_[first_entry_ % most_entries]);
  }
}

// What is behind other work of its stream has not begun before that ended.
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

}  // namespace fsdp::engine
