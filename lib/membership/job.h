// SPDX-License-Identifier: Apache-2.0
// What a rank is told of its job before it joins: by the caller, or by the variables of the launcher.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/failure.h"

namespace fsdp::membership {

constexpr uint32_t most_ranks = 16384;  // of a job
// What a rank may show to others while all go on with something else: Posts.
constexpr size_t post_bytes = 96, post_text_bytes = 320;

struct WorldOptions {
  uint32_t rank = 0;
  uint32_t size = 1;
  std::string rendezvous;  // where the ranks meet: a name (ranks of one host), tcp://host:port or file:///directory
  std::string secret;      // job secret, may be empty
  uint32_t timeout_ms = 300000;
  uint32_t attempt = 0;      // how often the launcher has started the job again; the ranks of two attempts never mix
  std::string job = {};      // what the launcher calls the job, may be empty
  std::string source = {};   // where all this is from, for the log
  std::string host_id = {};  // for tests: this rank's host; empty: the one that it runs on
  std::vector<uint32_t> stand_ins = {};  // for measurements: other ranks of this host, which no process is
  uint32_t heartbeat_timeout_ms = 8000;  // a rank or node that is silent for so long is lost; at least 1000
  // Rank 0 of a job that failed tells it to ranks that still come in this time: else they look for it until a timeout.
  uint32_t farewell_ms = 400;
  std::function<void(fsdp_log_level, const std::string &)> log = {};  // on the caller's thread; may be empty
  // Called from any thread while the world or one of its teams exists; may be empty.
  std::function<void(fsdp_log_level, const std::string &)> log_later = {};
};

// Reads the launcher's variables: those of torchrun (RANK and WORLD_SIZE), else of Open MPI, Slurm or MPICH.
// FSDP_RENDEZVOUS overrides where they meet. Without any of them the world has one rank. Throws INVALID_ARGUMENT that
// names what is missing or wrong.
WorldOptions read_launcher_environment();
// For rank and size that the caller gives: secret, attempt and, where it gives none, the rendezvous.
void complete_world(WorldOptions &options);
// FSDP_JOB_SECRET or FSDP_JOB_SECRET_FILE; empty if neither is set.
std::string read_job_secret();

}  // namespace fsdp::membership
