// SPDX-License-Identifier: Apache-2.0
// Asks the library what a job will allocate, through a planning context.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "fsdp.h"
#include "plan/job_spec.h"

namespace plan {

// Bytes by role, and in all.
struct Memory {
  std::array<uint64_t, FSDP_ROLE_HOME + 1> role_bytes{};
  uint64_t total() const { return role_bytes[FSDP_ROLE_ALL]; }
  uint64_t in_memory() const { return total() - role_bytes[FSDP_ROLE_HOME]; }
};

struct Pieces {
  uint64_t count = 0;
  double worst_padding = 0;  // padding divided by elements, of the piece where this is largest; worst_name is its name
  std::string worst_name;
};

// A rank that owns matrices, and how much of their cost it has: 1 is the mean of all ranks.
struct MatrixOwner {
  uint32_t rank = 0;
  uint64_t matrices = 0;
  double load = 0;
};

struct Matrices {
  uint64_t count = 0, waves = 0;
  uint64_t limit_bytes = 0;  // limit of the matrices of one owner in one wave
  uint64_t wire_bytes = 0;   // bytes that travel one way
  double load = 0;           // the largest, divided by the mean
  std::vector<MatrixOwner> owners;
};

// A proposed limit for full gradients (max_pending_bytes), and the bytes of the rank with the most bytes, with this
// limit.
struct ByParts {
  uint64_t limit_bytes = 0;  // 0: no proposal
  uint64_t total = 0;
};

struct Estimate {
  fsdp_model_info info;
  Memory largest;             // memory of the rank with the most bytes
  uint32_t largest_rank = 0;  // in the shard axis
  uint64_t smallest_total = 0;
  Memory unsharded;   // one rank that keeps everything whole
  Memory all_shards;  // one rank that keeps every shard, and nothing whole
  // Of quantized parameters: each plane's name, and its bytes on all ranks of a replica, with padding.
  std::vector<std::pair<std::string, uint64_t>> planes;
  Pieces pieces;  // only groups with several pieces count
  Matrices matrices;
  ByParts by_parts;
  uint64_t groups = 0;
  uint64_t params = 0;
};

Estimate estimate(const ModelSpec &model, const Policy &policy);

}  // namespace plan
