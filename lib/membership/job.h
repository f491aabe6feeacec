// SPDX-License-Identifier: Apache-2.0
// What a rank knows about its job before it joins: from the caller, or from the variables of the launcher.
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
// Sizes of what a rank may show to the others at any time, without a collective: see Posts.
constexpr size_t post_bytes = 96, post_text_bytes = 320;

struct WorldOptions {
  uint32_t rank = 0;
  uint32_t size = 1;
  std::string rendezvous;  // where the ranks meet: a name (ranks of one host), tcp://host:port or file:///directory
  std::string secret;      // job secret, may be empty
  uint32_t timeout_ms = 300000;
  uint32_t attempt = 0;      // how often the launcher has started the job again; the ranks of two attempts never mix
  std::string job = {};      // the launcher's name for the job, may be empty
  std::string source = {};   // where these options come from, for the log
  std::string host_id = {};  // for tests: identity of this rank's host; empty: the host that it runs on
  std::vector<uint32_t> stand_ins = {};  // for measurements: ranks of this host that have no process
  uint32_t heartbeat_timeout_ms = 8000;  // a rank or node is lost after this much silence; at least 1000
  // For this long, rank 0 of a job that could not form tells ranks that still arrive why. Without that they would look
  // for rank 0 until their timeout.
  uint32_t farewell_ms = 400;
  std::function<void(fsdp_log_level, const std::string &)> log = {};  // on the caller's thread; may be empty
  // Called from any thread while the world or one of its teams exists; may be empty.
  std::function<void(fsdp_log_level, const std::string &)> log_later = {};
};

// Reads the launcher's variables: those of torchrun (RANK and WORLD_SIZE), else of Open MPI, Slurm or MPICH.
// FSDP_RENDEZVOUS overrides the rendezvous. Without any of these variables the world has one rank. Throws
// INVALID_ARGUMENT that names what is missing or wrong.
WorldOptions read_launcher_environment();
// Where the caller gives rank and size: fills in the secret, the attempt and, if the caller gives none, the rendezvous.
void complete_world(WorldOptions &options);
// FSDP_JOB_SECRET or FSDP_JOB_SECRET_FILE; empty if neither is set.
std::string read_job_secret();

// The version that all ranks of a job must share: they exchange memory and messages in forms that only it knows.

// Raised with every change, anywhere in the library, to what ranks of different processes exchange.
constexpr uint32_t wire_version = 9;
constexpr const char *library_version = FSDP_VERSION_TEXT;

// Empty, or why rank `rank` with these versions cannot be in a job whose rank `host` has this library.
inline std::string compare_versions(uint32_t rank, uint32_t wire, const std::string &library, uint32_t host) {
  if (wire == wire_version && library == library_version) return {};
  return format_text(
      "rank {} has libfsdp {} (wire format {}), rank {} has libfsdp {} (wire format {}): all ranks of a job "
      "need the same",
      rank, library, wire, host, library_version, wire_version);
}

}  // namespace fsdp::membership
