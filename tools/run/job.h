// SPDX-License-Identifier: Apache-2.0
// A job: N ranks on this machine, from their start to the last one's end.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace run {

struct JobOptions {
  uint32_t ranks = 1;
  std::chrono::duration<double> timeout{0};  // 0: none
  std::chrono::duration<double> grace{5};    // between SIGTERM and SIGKILL
  bool prefix = true;
  std::vector<std::string> command;
};

// Runs the job and returns the status to exit with. Throws StartError and std::system_error.
int run_job(const JobOptions &options);

}  // namespace run
