// SPDX-License-Identifier: Apache-2.0
// For fsdp-run --debug: preloads a handler into ranks (fault_line.c), which names the group if the rank faults in
// memory of the library. The files that the handler and the library need exist as long as this object.
#pragma once

#include <string>

#include "run/rank_process.h"

namespace run {

class FaultLines {
 public:
  // If the handler is not available, a line on standard error says why, and the job runs without it.
  FaultLines();
  ~FaultLines();
  FaultLines(const FaultLines &) = delete;
  FaultLines &operator=(const FaultLines &) = delete;
  void add_to(RankProcess::Environment &environment) const;

 private:
  std::string preload_, directory_;  // of the handler; for views-PID.txt
};

}  // namespace run
