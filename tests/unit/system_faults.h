// SPDX-License-Identifier: Apache-2.0
// A program that is linked with system_faults.cpp has its own openat, pwrite and other calls that files of checkpoints
// use. Each call is counted, and one of them can fail, do a part, or be the process's last.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace fsdp::test {

struct SystemFault {
  // A call that stands waits until a scope ends.
  enum class Way { none, fails, does_a_part, kills_before, kills_after, waits, stands };
  Way way = Way::none;
  int at = 0;    // the number of the call, from 0 on; -1: all calls
  int code = 0;  // errno, or milliseconds for a call that waits
  // Only calls of this name are counted; an empty name means all calls.
  std::string call;
};

// Applies to the calls of this thread and others from here to the end of the scope.
class FaultScope {
 public:
  explicit FaultScope(SystemFault fault);
  ~FaultScope();
  FaultScope(const FaultScope &) = delete;
  FaultScope &operator=(const FaultScope &) = delete;

  int calls() const;                     // calls that were counted
  bool happened() const;                 // whether the fault happened
  std::string what() const;              // the name of the call that it happened to
  std::vector<std::string> log() const;  // the names of all counted calls, in order
};

}  // namespace fsdp::test
