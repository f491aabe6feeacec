// SPDX-License-Identifier: Apache-2.0
// What each launcher says about the job in its own variables.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::membership {

struct LaunchedRank {
  const char *launcher = "";  // whose variables these are
  uint32_t rank = 0, size = 1;
  bool one_host = false;  // all ranks are on this host for sure
  std::string unplaced;   // which variables would say where ranks are, if none does; else empty
  std::string job;        // what the launcher calls the job, may be empty
  std::string name;       // where ranks of one host meet; empty: `help` says what to do
  std::string address;    // "tcp://host:port" for several hosts; empty: `help` says what to do
  std::string help;
};

// Each: empty if this launcher has not started the process. Throws INVALID_ARGUMENT naming what is missing or wrong.
// Some of torchrun's names are everyday ones: alone, MASTER_ADDR and MASTER_PORT count only if nobody else has.
std::optional<LaunchedRank> read_torchrun(bool alone);
std::optional<LaunchedRank> read_open_mpi();
std::optional<LaunchedRank> read_slurm();
std::optional<LaunchedRank> read_mpich();

// The first of Slurm's list of hosts: "a[03-05,9],b" is a03. Throws INVALID_ARGUMENT.
std::string first_host(const std::string &list);

}  // namespace fsdp::membership
