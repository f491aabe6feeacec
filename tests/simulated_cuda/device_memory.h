// SPDX-License-Identifier: Apache-2.0
// Counts how much of a device's memory is taken.
#pragma once

#include "simulated_cuda/device.h"

namespace simulated {

inline bool take(Device &device, uint64_t bytes) {
  uint64_t taken = device.allocated.load();
  do {
    if (taken > device.memory || bytes > device.memory - taken) return false;
  } while (!device.allocated.compare_exchange_weak(taken, taken + bytes));
  return true;
}

inline void give_back(Device &device, uint64_t bytes) { device.allocated -= bytes; }

}  // namespace simulated
