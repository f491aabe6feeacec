// SPDX-License-Identifier: Apache-2.0
// What the ranks of a job find in their environment.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "run/fault_lines.h"
#include "run/job.h"
#include "run/rank_process.h"

namespace run {

// What the ranks of this machine share, and what of it every attempt shares too.
class JobEnvironment {
 public:
  // port: where a job of this machine alone meets. Throws UsageError if the machines could not meet.
  JobEnvironment(const JobOptions &options, uint16_t port);
  RankProcess::Environment of_rank(uint32_t local_rank, uint32_t attempt) const;

 private:
  uint32_t first_rank_;
  std::optional<FaultLines> fault_lines_;  // in debug mode
  RankProcess::Environment shared_;
};

}  // namespace run
