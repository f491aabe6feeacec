// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/calls.h"

#include <mutex>

namespace simulated {

int Calls::count(const char *name) {
  {
    const std::shared_lock lock(mutex_);
    if (const auto found = entries_.find(name); found != entries_.end()) {
      found->second.calls.fetch_add(1, std::memory_order_relaxed);
      int error = 0;
      for (Plan &plan : found->second.plans) {  // every failure that a test planned sees the call
        const uint64_t seen = plan.seen.fetch_add(1, std::memory_order_relaxed) + 1;
        if (plan.nth == 0 || seen == plan.nth) error = plan.error;
      }
      return error;
    }
  }
  const std::unique_lock lock(mutex_);
  entries_[name].calls.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

uint64_t Calls::counted(const char *name) const {
  const std::shared_lock lock(mutex_);
  const auto found = entries_.find(name);
  return found == entries_.end() ? 0 : found->second.calls.load(std::memory_order_relaxed);
}

void Calls::plan(const char *name, uint64_t nth, int error) {
  const std::unique_lock lock(mutex_);
  entries_[name].plans.emplace_back(nth, error);
}

void Calls::forget_counts() {
  const std::unique_lock lock(mutex_);
  for (auto &[name, entry] : entries_) entry.calls = 0;
}

void Calls::clear() {
  const std::unique_lock lock(mutex_);
  entries_.clear();
}

}  // namespace simulated
