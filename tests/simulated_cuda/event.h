// SPDX-License-Identifier: Apache-2.0
// An event is the state of a stream when the event was last recorded.
#pragma once

#include <mutex>
#include <vector>

#include "simulated_cuda/graph.h"

namespace simulated {

struct Recorded {
  Work *work = nullptr;        // empty if the event was never recorded, or was recorded in a capture
  Capture *capture = nullptr;  // the capture that recorded the event
  std::vector<Node *> tips;
};

struct Event {
  Event(Device &device, bool timing) : device(device), timing(timing) {}

  Recorded recorded() const {
    const std::lock_guard lock(mutex);
    return state;
  }
  void record(Recorded now) {
    const std::lock_guard lock(mutex);
    state = std::move(now);
  }

  Device &device;
  const bool timing;

 private:
  mutable std::mutex mutex;
  Recorded state;
};

}  // namespace simulated
