// SPDX-License-Identifier: Apache-2.0
// Counts calls by name and fails those that a test planned to fail.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <shared_mutex>
#include <string>

namespace simulated {

class Calls {
 public:
  // Counts the call, and returns the error that is planned for it, or else 0.
  int count(const char *name);
  uint64_t counted(const char *name) const;
  void plan(const char *name, uint64_t nth, int error);  // 0 means every call
  void forget_counts();
  void clear();

 private:
  struct Plan {
    Plan(uint64_t nth, int error) : nth(nth), error(error) {}
    const uint64_t nth;
    const int error;
    std::atomic<uint64_t> seen{0};
  };
  struct Entry {
    std::atomic<uint64_t> calls{0};
    std::deque<Plan> plans;
  };

  mutable std::shared_mutex mutex_;
  std::map<std::string, Entry> entries_;
};

}  // namespace simulated
