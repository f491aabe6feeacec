// SPDX-License-Identifier: Apache-2.0
// Provides an environment that has these variables of launchers and no others.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "shm_ranks.h"

namespace fsdp::transport::test {

using Variables = std::map<std::string, std::string>;

class Environment {
 public:
  explicit Environment(const Variables &variables) {
    clear();
    for (const auto &[name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() { clear(); }

 private:
  static void clear() {
    for (const char *name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "TORCHELASTIC_USE_AGENT_STORE",
                             "TORCHELASTIC_RUN_ID",
                             "TORCHELASTIC_RESTART_COUNT",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMIX_NAMESPACE",
                             "OMPI_MCA_ess_base_jobid",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "SLURM_LOCALID",
                             "SLURM_JOB_ID",
                             "SLURM_STEP_ID",
                             "SLURM_NNODES",
                             "SLURM_STEP_NUM_NODES",
                             "SLURM_STEP_NODELIST",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "MPI_LOCALRANKID",
                             "MPI_LOCALNRANKS",
                             "FSDP_RENDEZVOUS",
                             "FSDP_RESTART_COUNT",
                             "FSDP_JOB_SECRET",
                             "FSDP_JOB_SECRET_FILE"})
      ::unsetenv(name);
  }
};

// Returns the variables with some of them changed, or removed if the value is "-".
inline Variables changed(Variables variables, const Variables &change) {
  for (const auto &[name, value] : change) {
    if (value == "-")
      variables.erase(name);
    else
      variables[name] = value;
  }
  return variables;
}

}  // namespace fsdp::transport::test
