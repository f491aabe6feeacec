// SPDX-License-Identifier: Apache-2.0
// What a library stream does, as events of its lane. Without a timeline nothing is enqueued but the work itself.
#pragma once

#include "comm/communicator.h"
#include "device/device.h"
#include "trace/timeline.h"

namespace fsdp::engine {

class StreamTrace {
 public:
  StreamTrace(device::Stream &stream, trace::Timeline *timeline, trace::Lane lane)
      : stream_(stream), timeline_(timeline), lane_(lane) {}
  StreamTrace(const StreamTrace &) = delete;
  StreamTrace &operator=(const StreamTrace &) = delete;

  // The stream waits at the gate. what is for its errors, name and object for the event.
  void await(comm::Gate &gate, uint64_t value, const char *what, const char *name, const char *object, uint64_t version);
  // The work that is enqueued between the two calls.
  void begin();
  void end(const char *name, const char *object, uint64_t bytes, uint64_t version);

 private:
  void record(trace::Event event) const noexcept;

  device::Stream &stream_;
  trace::Timeline *timeline_;
  trace::Lane lane_;
  uint64_t begin_ns_ = 0;  // the stream's own
};

}  // namespace fsdp::engine
