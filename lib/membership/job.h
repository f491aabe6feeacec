// SPDX-License-Identifier: Apache-2.0
// What a rank knows about its job before it joins: options of the caller, or variables of the launcher.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/failure.h"

namespace fsdp::membership {

constexpr uint32_t max_ranks = 16384;  // in a job
// Sizes of a post: data that a rank may show to the others at any time, without a collective (Posts).
constexpr size_t post_bytes = 96, post_text_bytes = 320;

struct WorldOptions {
  uint32_t rank = 0;
  uint32_t size = 1;
  std::string rendezvous;  // where the ranks meet: a name (for ranks of one host), tcp://host:port or file:///directory
  std::string secret;      // job secret, may be empty
  uint32_t timeout_ms = 300000;
  uint32_t attempt = 0;                  // number of restarts by the launcher; the ranks of two attempts never mix
  std::string job = {};                  // the launcher's name for the job, may be empty
  std::string source = {};               // the source of these options, for the log
  std::string host_id = {};              // for tests: identity of this rank's host; empty: the real one
  std::vector<uint32_t> stand_ins = {};  // for measurements: ranks of this host that have no process
  uint32_t heartbeat_timeout_ms = 8000;  // a rank or node that is silent for longer is lost; at least 1000
  // If the job could not form, rank 0 tells late ranks the reason during this time. Otherwise they would look for rank
  // 0 until their timeout.
  uint32_t farewell_ms = 400;
  std::function<void(fsdp_log_level, const std::string &)> log = {};  // called on the caller's thread; may be empty
  // Called on any thread while the world or one of its teams exists; may be empty.
  std::function<void(fsdp_log_level, const std::string &)> log_later = {};
};

// Reads the launcher's variables: those of torchrun (RANK and WORLD_SIZE), else of Open MPI, Slurm or MPICH.
// FSDP_RENDEZVOUS overrides the rendezvous. Without any of these variables the world has one rank. Throws
// INVALID_ARGUMENT, which names the variable that is missing or wrong.
WorldOptions read_launcher_environment();
// For a caller that passes rank and size: fills in the secret, the attempt and, if the caller passes none, the
// rendezvous.
void complete_world(WorldOptions &options);
// FSDP_JOB_SECRET or FSDP_JOB_SECRET_FILE; empty if neither is set.
std::string read_job_secret();

// The version that all ranks of a job must share, because the forms of shared memory and messages depend on it.

// Must be raised with every change, anywhere in the library, to the data that ranks of different processes exchange.
constexpr uint32_t wire_version = 10;
constexpr const char *library_version = FSDP_VERSION_TEXT;

// Says why rank `rank` with these versions cannot be in a job whose rank `host` has this library; empty if it can.
inline std::string compare_versions(uint32_t rank, uint32_t wire, const std::string &library, uint32_t host) {
  if (wire == wire_version && library == library_version) return {};
  return format_text(
      "rank {} has libfsdp {} (wire format {}), rank {} has libfsdp {} (wire format {}): all ranks of a job "
      "need the same",
      rank, library, wire, host, library_version, wire_version);
}

}  // namespace fsdp::membership
