// SPDX-License-Identifier: Apache-2.0
// An event: the state of a stream when it was last recorded.
#pragma once

#include <mutex>
#include <vector>

#include "simulated_cuda/graph.h"

namespace simulated {

struct Recorded {
  Work *work = nullptr;        // none: never recorded, or in a capture
  Capture *capture = nullptr;  // recorded in it
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
