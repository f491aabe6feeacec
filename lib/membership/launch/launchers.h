// SPDX-License-Identifier: Apache-2.0
// Reads what each launcher tells about the job in its environment variables.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace fsdp::membership {

// Environment variables, read with checks.

// An empty variable counts as not set, because some launchers unset variables in this way.
inline std::optional<std::string> variable(const char *name) {
  const char *value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): the caller's program owns its environment
  if (!value || !*value) return {};
  return value;
}

inline uint32_t number(const char *name, const std::string &value, uint32_t least, uint32_t most) {
  uint32_t result = 0;
  const char *end = value.data() + value.size();
  const auto [stop, code] = std::from_chars(value.data(), end, result);
  if (code != std::errc() || stop != end || result < least || result > most)
    fail(FSDP_INVALID_ARGUMENT, "{}='{}' is not a number from {} to {}", name, value, least, most);
  return result;
}

// Checks that all of these variables are set; otherwise fails, and lists the variables that are set and those that are
// missing.
inline void check_complete(const char *launcher, std::initializer_list<const char *> needed) {
  std::vector<std::string_view> set, missing;
  for (const char *name : needed) (variable(name) ? set : missing).emplace_back(name);
  if (missing.empty()) return;
  fail(FSDP_INVALID_ARGUMENT, "{} {} set, but {} {} not: {} sets all of {}", fmt::join(set, ", "),
       set.size() == 1 ? "is" : "are", fmt::join(missing, ", "), missing.size() == 1 ? "is" : "are", launcher,
       fmt::join(needed, ", "));
}

struct LaunchedRank {
  const char *launcher = "";  // the launcher that set the variables
  uint32_t rank = 0, size = 1;
  bool one_host = false;  // it is certain that all ranks are on this host
  std::string unplaced;   // if the ranks' hosts are unknown: says which variables are missing; else empty
  std::string job;        // the launcher's name for the job, may be empty
  std::string name;       // where ranks of one host meet; empty: `help` says what to do
  std::string address;    // "tcp://host:port" for several hosts; empty: `help` says what to do
  std::string help;
};

// Each function returns nothing if its launcher has not started this process. Throws INVALID_ARGUMENT, which names the
// variable that is missing or wrong. `alone`: no other launcher has started the process. Only then do MASTER_ADDR and
// MASTER_PORT count without RANK and WORLD_SIZE, because these names are common.
std::optional<LaunchedRank> read_torchrun(bool alone);
std::optional<LaunchedRank> read_open_mpi();
std::optional<LaunchedRank> read_slurm();
std::optional<LaunchedRank> read_mpich();

// The first host of a list in Slurm's form: a03 for "a[03-05,9],b". Throws INVALID_ARGUMENT.
std::string first_host(const std::string &list);

}  // namespace fsdp::membership
