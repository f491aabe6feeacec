// SPDX-License-Identifier: Apache-2.0
// What a library stream does: as entries of the flight recorder, and as events of its lane if there is a timeline.
// Streams that run tasks write the times themselves; of others only their events tell (in_flight.h).
#pragma once

#include "device/device.h"
#include "engine/in_flight.h"
#include "trace/flight_sequence.h"
#include "trace/timeline.h"
#include "transport/team.h"

namespace fsdp::engine {

struct GradPart;
struct Group;

// What a collective is about, as the flight recorder and the timeline keep it.
struct Traced {
  const char *in_flight, *in_timeline;
  uint8_t planes = 0;                   // trace::TimelinePlanes
  Traced(const Group &group) noexcept;  // NOLINT: implicit on purpose
  Traced(const Group &group, uint8_t moved) noexcept;
  Traced(const GradPart &part) noexcept;  // NOLINT: implicit on purpose
  explicit Traced(const char *literal) noexcept : in_flight(literal), in_timeline(literal) {}
};

class StreamTrace {
 public:
  StreamTrace(Context &context, device::Stream &stream, trace::TimelineLane lane, trace::FlightSequence flights)
      : stream_(stream),
        timeline_(context.timeline()),
        lane_(lane),
        flights_(flights),
        in_flight_(stream.runs_tasks() ? nullptr : std::make_unique<InFlight>(context)) {}
  StreamTrace(const StreamTrace &) = delete;
  StreamTrace &operator=(const StreamTrace &) = delete;

  // The stream waits until all have published the version. what is for its errors, object for the event.
  void await(transport::Versions &versions, uint64_t version, const char *what, const char *object);
  // The work that is enqueued between the two calls, a collective. Its communicator, if given, knows
  // whether it was skipped.
  void begin(const char *name, const Traced &of, uint64_t bytes);
  template <class Comm>
  void end(const char *name, const Traced &of, uint64_t bytes, uint64_t version, const Comm &by) {
    end_of(name, of, bytes, version, &by,
           [](const void *comm) { return static_cast<const Comm *>(comm)->broken().has_value(); });
  }
  void end(const char *name, const Traced &of, uint64_t bytes, uint64_t version) {
    end_of(name, of, bytes, version, nullptr, nullptr);
  }
  void next_round() noexcept { flights_.next_round(); }
  // Looks which work of a device's stream is done.
  void settle() noexcept {
    if (in_flight_) in_flight_->settle();
  }

 private:
  using Broken = InFlight::Broken;
  bool captured() const;
  void end_of(const char *name, const Traced &of, uint64_t bytes, uint64_t version, const void *comm, Broken broken);
  void record(trace::TimelineEvent event) const noexcept;

  device::Stream &stream_;
  trace::Timeline *timeline_;
  trace::TimelineLane lane_;
  trace::FlightSequence flights_;
  uint64_t handle_ = 0;                  // of the work between begin and end; the caller's
  uint64_t begin_ns_ = 0;                // the stream's own; where it runs no tasks the caller's
  std::unique_ptr<InFlight> in_flight_;  // NULL where it does
};

}  // namespace fsdp::engine
