// SPDX-License-Identifier: Apache-2.0
// What the ranks of a job find in their environment.
#pragma once

#include <cstdint>
#include <string>

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
  RankProcess::Environment shared_;
};

}  // namespace run
