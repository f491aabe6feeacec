// SPDX-License-Identifier: Apache-2.0
// Records the work of a library stream: as entries of the flight recorder, and as events of its lane if there is a
// timeline. Streams that run tasks write the times themselves; for other streams the times come from events (InFlight).
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "device/device.h"
#include "engine/context/context.h"
#include "trace/flight.h"
#include "trace/timeline.h"
#include "transport/team.h"

namespace fsdp::engine {

// Points in the order of the caller's streams, with an event for each stream in use. Recording one event on two streams
// makes the second stream wait for the first, so streams that share an event slow each other down.

class StreamEvents {
 public:
  static constexpr size_t max_streams = 4;

  void create(device::Device &device) {
    const size_t count = device.traits().host_memory ? 1 : max_streams;  // on the host there is one stream
    for (size_t i = 0; i < count; ++i) entries_.push_back({nullptr, false, device.create_event()});
  }
  // The event of this stream. If there are too many streams and no event is done, streams share the last event.
  device::Event &of(fsdp_stream stream) noexcept {
    const auto mine = [=](const Point &point) { return point.used && point.stream == stream; };
    const auto free = [](const Point &point) { return !point.used || point.event->done(); };
    auto found = std::find_if(entries_.begin(), entries_.end(), mine);
    if (found == entries_.end()) found = std::find_if(entries_.begin(), entries_.end(), free);
    if (found == entries_.end()) --found;
    found->stream = stream;
    found->used = true;
    return *found->event;
  }
  template <class Visit>
  void for_each(Visit &&visit) const {
    for (const Point &point : entries_) visit(*point.event);
  }

 private:
  struct Point {
    fsdp_stream stream;
    bool used;
    std::unique_ptr<device::Event> event;
  };
  std::vector<Point> entries_;
};

// Tracks work of a device's stream, which does not report its end. An event is recorded behind the work, and the next
// call that finds the event done completes the work's entries. The numbers of events and entries are fixed, so a step
// allocates nothing.

class InFlight final : public Unsettled {
 public:
  using Broken = bool (*)(const void *comm);
  struct Tracked {
    uint64_t handle = 0;  // handle in the flight recorder
    trace::TimelineEvent event{};
    const void *comm = nullptr;  // NULL: the work is never skipped
    Broken broken = nullptr;
  };

  explicit InFlight(Context &context);
  ~InFlight() override;
  InFlight(const InFlight &) = delete;
  InFlight &operator=(const InFlight &) = delete;

  // Adds an entry for work that is already enqueued on the stream.
  void add(device::Stream &stream, const Tracked &entry);
  // Completes the entries of work that is done. Does nothing once the context has failed, because streams then pass
  // over work without doing it. Any thread may call it.
  void settle() noexcept override;

 private:
  static constexpr uint64_t max_marks = 32, max_entries = 512;
  struct Mark {
    std::unique_ptr<device::Event> event;
    uint64_t end = 0;  // entries before this one are done when the event is done
  };
  void complete(const Tracked &entry) noexcept;

  Context &context_;
  std::mutex mutex_;
  std::array<Mark, max_marks> marks_;
  std::vector<Tracked> entries_;
  uint64_t first_mark_ = 0, next_mark_ = 0;  // marks from first_mark_ up to next_mark_ are pending, oldest first
  uint64_t first_entry_ = 0, next_entry_ = 0;
  uint64_t last_end_ns_ = 0;
};

struct GradPart;
struct Group;

// The names of a collective's object, as copied by the flight recorder and by the timeline.
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

  // Makes the stream wait until all ranks have published the version. `what` is for errors, and `object` for the event.
  void await(transport::Versions &versions, uint64_t version, const char *what, const char *object);
  // A collective is the work that is enqueued between begin() and end(). Its communicator, if one is passed, knows
  // whether the work was skipped.
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
  // Finds out which work of a device's stream is done.
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
  uint64_t handle_ = 0;                  // handle of the work between begin and end; used by the caller
  uint64_t begin_ns_ = 0;                // used by the stream, or by the caller if the stream runs no tasks
  std::unique_ptr<InFlight> in_flight_;  // NULL if the stream runs tasks
};

}  // namespace fsdp::engine
