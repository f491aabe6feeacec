// SPDX-License-Identifier: Apache-2.0
// A program that is linked with system_faults.cpp has its own openat, pwrite and so on, as far as files of checkpoints
// use them. Each call is counted, and one of them can fail, do a part, or be the process's last.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace fsdp::test {

struct SystemFault {
  enum class Way { none, fails, does_a_part, kills_before, kills_after, waits, stands };  // stands: until a scope ends
  Way way = Way::none;
  int at = 0;    // the number of the call, from 0 on; -1: all of them
  int code = 0;  // errno; of one that waits, how many milliseconds
  // Only calls of this name count; empty: all.
  std::string call;
};

// Applies to the calls of this thread and others from here to the end of the scope.
class FaultScope {
 public:
  explicit FaultScope(SystemFault fault);
  ~FaultScope();
  FaultScope(const FaultScope &) = delete;
  FaultScope &operator=(const FaultScope &) = delete;

  int calls() const;                     // that counted
  bool happened() const;                 // the fault
  std::string what() const;              // the name of the call that it happened to
  std::vector<std::string> log() const;  // the names of all that counted, in their order
};

}  // namespace fsdp::test
