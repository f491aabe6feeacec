// SPDX-License-Identifier: Apache-2.0
// One ordered sequence of collectives in the flight recorder: numbered as the ranks' calls are, so that the entries of
// several ranks can be laid side by side.
#pragma once

#include <exception>

#include "trace/flight.h"

namespace fsdp::trace {

class FlightSequence {
 public:
  FlightSequence(FlightRecorder &flight, Sequence sequence, uint16_t model = 0) : flight_(flight) {
    next_.sequence = sequence;
    next_.model = model;
    next_.round = 1;
  }

  FlightRecorder &flight() noexcept { return flight_; }
  // The caller enqueues the next one. Returns its handle in the recorder.
  uint64_t enqueue(const char *what, const char *object, uint64_t bytes) noexcept {
    FlightCollective of = next_;
    of.what = what;
    of.object = object;
    of.elements = bytes;
    ++next_.number;
    return flight_.enqueue(of);
  }
  void next_round() noexcept {
    ++next_.round;
    next_.number = 0;
  }

 private:
  FlightRecorder &flight_;
  FlightCollective next_;
};

// A collective that the caller's thread does itself, from here to the end of the scope.
class FlightScope {
 public:
  FlightScope(FlightSequence &sequence, const char *what, uint64_t bytes, const char *object = nullptr) noexcept
      : flight_(sequence.flight()), handle_(sequence.enqueue(what, object, bytes)) {
    flight_.start(handle_);
  }
  ~FlightScope() {
    if (std::uncaught_exceptions() > exceptions_)
      flight_.fail(handle_);
    else
      flight_.complete(handle_);
  }
  FlightScope(const FlightScope &) = delete;
  FlightScope &operator=(const FlightScope &) = delete;

 private:
  FlightRecorder &flight_;
  uint64_t handle_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace fsdp::trace
