// SPDX-License-Identifier: Apache-2.0
// fsdp-run --debug: a rank that faults in memory of the library's says in which group, by a handler that is preloaded
// into it (fault_line.c). What the handler and the library need lives as long as this object.
#pragma once

#include <string>

#include "run/rank_process.h"

namespace run {

class FaultLines {
 public:
  // If the handler cannot be had, a line on standard error says why, and the job runs without it.
  FaultLines();
  ~FaultLines();
  FaultLines(const FaultLines &) = delete;
  FaultLines &operator=(const FaultLines &) = delete;
  void add_to(RankProcess::Environment &environment) const;

 private:
  std::string preload_, directory_;  // of the handler; for views-PID.txt
};

}  // namespace run
