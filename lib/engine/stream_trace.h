// SPDX-License-Identifier: Apache-2.0
// What a library stream does: as entries of the flight recorder, and as events of its lane if there is a timeline.
#pragma once

#include "comm/communicator.h"
#include "device/device.h"
#include "trace/flight_sequence.h"
#include "trace/timeline.h"

namespace fsdp::engine {

struct Group;

class StreamTrace {
 public:
  StreamTrace(device::Stream &stream, trace::Timeline *timeline, trace::Lane lane, trace::FlightSequence flights)
      : stream_(stream), timeline_(timeline), lane_(lane), flights_(flights) {}
  StreamTrace(const StreamTrace &) = delete;
  StreamTrace &operator=(const StreamTrace &) = delete;

  // The stream waits at the gate. what is for its errors, name and object for the event.
  void await(comm::Gate &gate, uint64_t value, const char *what, const char *name, const char *object, uint64_t version);
  // The work that is enqueued between the two calls, a collective of the group. Its communicator, if given, knows whether
  // it was skipped.
  void begin(const char *name, const Group &group, uint64_t bytes);
  template <class Comm>
  void end(const char *name, const Group &group, uint64_t bytes, uint64_t version, const Comm &of) {
    end_of(name, group, bytes, version, &of, [](const void *comm) { return static_cast<const Comm *>(comm)->broken().has_value(); });
  }
  void end(const char *name, const Group &group, uint64_t bytes, uint64_t version) {
    end_of(name, group, bytes, version, nullptr, nullptr);
  }
  void next_round() noexcept { flights_.next_round(); }

 private:
  using Broken = bool (*)(const void *comm);
  void end_of(const char *name, const Group &group, uint64_t bytes, uint64_t version, const void *comm, Broken broken);
  void record(trace::Event event) const noexcept;

  device::Stream &stream_;
  trace::Timeline *timeline_;
  trace::Lane lane_;
  trace::FlightSequence flights_;
  uint64_t handle_ = 0;    // of the work between begin and end; the caller's
  uint64_t begin_ns_ = 0;  // the stream's own
};

}  // namespace fsdp::engine
