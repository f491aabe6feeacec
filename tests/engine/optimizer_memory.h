// SPDX-License-Identifier: Apache-2.0
// Models with main weights and states in fewer bits, on every kind of mesh.
#pragma once

#include "checkpoint_folder.h"
#include "compact_reference.h"

namespace harness {

inline constexpr uint64_t seed = 0x0123456789ABCDEF;

struct Form {
  const char *name;
  fsdp_main_storage storage;
  fsdp_optimizer optimizer;
};
inline constexpr Form forms[] = {
    {"Float32With8Bit", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_ADAMW_8BIT},
    {"Split16", FSDP_MAIN_SPLIT16, FSDP_OPTIMIZER_ADAMW},
    {"Split16With8Bit", FSDP_MAIN_SPLIT16, FSDP_OPTIMIZER_ADAMW_8BIT},
    {"None", FSDP_MAIN_NONE, FSDP_OPTIMIZER_ADAMW},
    {"NoneWith8Bit", FSDP_MAIN_NONE, FSDP_OPTIMIZER_ADAMW_8BIT},
};

struct Layout {
  const char *name;
  fsdp_strategy strategy;
  uint32_t ranks, replicas;
  fsdp_unshard_mode mode;
  bool hybrid, debug;
  uint32_t ranks_per_host = 0;  // 0: one host
};
inline constexpr Layout layouts[] = {
    {"One", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1, 1, FSDP_UNSHARD_MAPPED, false, false},
    {"NoShard", FSDP_STRATEGY_NO_SHARD, 3, 1, FSDP_UNSHARD_COPIED, false, false},
    {"Optim", FSDP_STRATEGY_OPTIM, 2, 1, FSDP_UNSHARD_COPIED, false, false},
    {"OptimMapped", FSDP_STRATEGY_OPTIM, 3, 1, FSDP_UNSHARD_MAPPED, false, false},
    {"OptimGrads", FSDP_STRATEGY_OPTIM_GRADS, 3, 1, FSDP_UNSHARD_MAPPED, false, false},
    {"FullMapped", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, 1, FSDP_UNSHARD_MAPPED, false, false},
    {"FullCopied", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, 1, FSDP_UNSHARD_COPIED, false, false},
    {"Debug", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, 1, 0, false, true},
    {"Hsdp", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 2, FSDP_UNSHARD_COPIED, false, false},
    {"Hfsdp", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 2, FSDP_UNSHARD_MAPPED, true, false},
    {"HfsdpOptim", FSDP_STRATEGY_OPTIM, 4, 2, FSDP_UNSHARD_COPIED, true, false},
    {"Hosts", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 1, FSDP_UNSHARD_MAPPED, false, false, 2},
    {"HostsOptim", FSDP_STRATEGY_OPTIM, 4, 1, FSDP_UNSHARD_COPIED, false, false, 2},
    {"HfsdpHosts", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 2, FSDP_UNSHARD_COPIED, true, false, 2},
};

// The parameters have rows of many lengths; one is a vector, one a stack of matrices, one in fp32, and some are too
// small for codes.
inline std::vector<GroupDef> mixed_groups() {
  constexpr fsdp_dtype bf16 = FSDP_BFLOAT16;
  return {{"embedding", {{"wte", {129, 48}, bf16}, {"gain", {48}}}},
          {"block", {{"w1", {40, 256}, bf16}, {"b1", {300}, bf16, FSDP_PARAM_NO_DECAY}, {"w2", {33, 160}, bf16}}},
          {"rest", {{"v", {5000}, bf16}, {"stack", {3, 17, 96}, bf16}, {"head", {70, 64}, FSDP_FLOAT32}}}};
}

inline Scenario scenario_by(const Form &form, const Layout &layout) {
  Scenario setup = layout.debug ? debug_scenario(layout.strategy, layout.ranks)
                                : scenario_of(layout.strategy, layout.ranks, layout.mode);
  setup.groups = mixed_groups();
  setup.model.main_storage = form.storage;
  setup.model.optimizer = form.optimizer;
  setup.model.rounding_seed = seed;
  setup.clip = 1.5;
  setup.steps = 3;
  setup.context.ranks_per_host = layout.ranks_per_host;
  if (layout.replicas > 1) {
    setup.mesh.replicate_size = layout.replicas;
    setup.mesh.shard_size = layout.ranks / layout.replicas;
    if (layout.hybrid) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
  }
  return setup;
}

inline Scenario one_parameter(const char *name, uint64_t count, const Form &form, uint64_t rounding_seed) {
  Scenario setup;
  setup.ranks = 2;
  setup.groups = {{"all", {{name, {count}, FSDP_BFLOAT16}}}};
  setup.model.main_storage = form.storage;
  setup.model.optimizer = form.optimizer;
  setup.model.rounding_seed = rounding_seed;
  setup.model.grad_op = FSDP_GRAD_OP_FACTOR;
  setup.model.grad_factor = 0.5;  // both ranks give the same gradient, in fp32
  setup.model.grad_dtype = FSDP_FLOAT32;
  return setup;
}

}  // namespace harness
