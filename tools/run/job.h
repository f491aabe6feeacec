// SPDX-License-Identifier: Apache-2.0
// A job, or this machine's part of a job: runs N ranks from their start to the end of the last one, and starts them
// again after a failure.
#pragma once

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace run {

struct JobOptions {
  uint32_t ranks = 1;                        // on this machine
  uint32_t nodes = 1;                        // machines; each has as many ranks
  uint32_t node_rank = 0;                    // which of them this one is
  std::string rendezvous;                    // where the ranks meet; may be empty for one machine
  uint32_t max_restarts = 0;                 // how often the ranks are started again after one failed
  std::chrono::duration<double> timeout{0};  // 0: none
  std::chrono::duration<double> grace{5};    // time in which the others may report and end after one failed
  std::chrono::duration<double> kill{5};     // time between SIGTERM and SIGKILL
  bool prefix = true;
  // Values of FSDP_LOG, FSDP_DEBUG, FSDP_TRACE and FSDP_TIMEOUT for the ranks; without a value the environment's stays.
  std::string log;
  bool debug = false;
  std::string trace;
  uint32_t wait_seconds = 0;
  std::vector<std::string> command;
};

// The options contradict each other or the environment.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs the job and returns the status to exit with. Throws UsageError, StartError and std::system_error.
int run_job(const JobOptions &options);

}  // namespace run
