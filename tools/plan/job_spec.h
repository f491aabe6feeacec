// SPDX-License-Identifier: Apache-2.0
// What fsdp-plan is asked to size: a model as groups of parameters, and how it is to be sharded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp.h"

namespace plan {

struct ParamSpec {
  std::string name;
  std::vector<uint64_t> shape;
  fsdp_dtype dtype = 0;
  uint32_t flags = 0;
  fsdp_granule granule = 0;
  uint64_t granule_rows = 0;
  uint32_t row_dimensions = 0;
  fsdp_quantization quantization = 0;
  uint32_t piece = 0;
  fsdp_optimizer optimizer = 0;
  fsdp_matrix_layout matrix = 0;
  std::vector<uint64_t> matrix_splits{};  // empty: one matrix
};

struct GroupSpec {
  std::string name;
  uint32_t flags = 0;
  fsdp_strategy strategy = 0;
  fsdp_dtype grad_dtype = 0;
  fsdp_dtype reduce_dtype = 0;
  fsdp_main_storage main_storage = 0;
  fsdp_backward_weights backward_weights = 0;
  uint32_t meshes = 1;     // rank r has the group in mesh number r % meshes, as experts are divided
  uint32_t replicate = 0;  // replicas of each of these meshes; 0: the job's if there is one mesh, else 1
  std::vector<ParamSpec> params;
};

struct ModelSpec {
  std::string name;
  std::vector<GroupSpec> groups;
};

struct Policy {
  uint32_t ranks = 8;
  uint32_t replicate = 1;
  uint32_t ranks_per_host = 0;  // 0: all
  fsdp_outer_strategy outer = 0;
  fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
  fsdp_dtype compute_dtype = FSDP_BFLOAT16;  // for parameters without a dtype of their own
  fsdp_dtype grad_dtype = 0;
  fsdp_dtype reduce_dtype = 0;
  fsdp_unshard_mode unshard_mode = FSDP_UNSHARD_MAPPED;
  fsdp_reduce_policy reduce_policy = 0;
  fsdp_optimizer optimizer = FSDP_OPTIMIZER_ADAMW;
  fsdp_optimizer states = FSDP_OPTIMIZER_ADAMW;  // AdamW with fp32 states or with those of 8 bits
  fsdp_main_storage main_storage = FSDP_MAIN_FLOAT32;
  fsdp_schedule_kind schedule = FSDP_SCHEDULE_SEQUENTIAL;
  bool by_piece = false;  // the pieces of groups are gathered one by one
  uint32_t held_groups = 0;
  uint32_t prefetch = 1;
  uint32_t max_pending_groups = 2;
  uint64_t max_pending_bytes = 0;
  uint64_t save_staging = 0;
  uint64_t matrix_bytes = 0;
  fsdp_home state_home = FSDP_HOME_DEVICE, main_home = FSDP_HOME_DEVICE, grad_home = FSDP_HOME_DEVICE;
  uint64_t turn_bytes = 0;
  uint32_t turns = 0;

  bool has_file() const {
    return state_home == FSDP_HOME_FILE || main_home == FSDP_HOME_FILE || grad_home == FSDP_HOME_FILE;
  }
  uint32_t host_ranks() const { return ranks_per_host ? ranks_per_host : ranks; }
};

// A decoder-only transformer.
struct TransformerShape {
  uint64_t layers = 12;
  uint64_t width = 768;
  uint64_t heads = 12;
  uint64_t kv_heads = 0;  // 0: heads
  uint64_t ffn = 0;       // 0: 4 x width
  uint64_t vocab = 50257;
  bool gated = false;                  // gate and up projections (SwiGLU) instead of one
  bool tied = false;                   // the head uses the embedding's weights
  fsdp_quantization quantization = 0;  // of the layers' matrices
  bool by_piece = false;               // a layer has two pieces, attention and the feed-forward layer
  bool muon = false;  // the layers' matrices come whole to a rank each, which updates them; AdamW updates the rest
};

// Throws std::invalid_argument.
ModelSpec build_transformer(const TransformerShape &shape);
ModelSpec read_model_file(const std::string &path);

}  // namespace plan
