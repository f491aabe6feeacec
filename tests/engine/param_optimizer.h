// SPDX-License-Identifier: Apache-2.0
// Models in which the caller updates the matrices and AdamW the rest.
#pragma once

#include "optimizer_memory.h"

namespace harness {

inline constexpr Form plain_form = {"Float32", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_ADAMW};
inline constexpr Form mixed_forms[] = {plain_form, forms[0], forms[1], forms[2], forms[3], forms[4]};

// "small" is too small for codes of 8 bits; "gain" and "head" are in fp32.
inline std::vector<GroupDef> groups_of_two_optimizers() {
  constexpr fsdp_dtype bf16 = FSDP_BFLOAT16;
  std::vector<GroupDef> groups = {
      {"embedding", {{"wte", {129, 48}, bf16}, {"gain", {48}}}},
      {"block", {{"w1", {40, 256}, bf16}, {"b1", {300}, bf16, FSDP_PARAM_NO_DECAY}, {"w2", {33, 160}, bf16}}},
      {"rest", {{"v", {5000}, bf16}, {"small", {3, 17, 9}, bf16}, {"head", {70, 64}, FSDP_FLOAT32}}}};
  for (GroupDef &group : groups)
    for (ParamDef &param : group.params)
      if (param.name == "wte" || param.name == "w1" || param.name == "head") param.optimizer = FSDP_OPTIMIZER_CALLER;
  return groups;
}

// Groups with bf16 matrices of the caller's have fp32 main weights in place of two halves.
inline Scenario mixed_scenario(const Form &form, const Layout &layout) {
  Scenario setup = scenario_by(form, layout);
  setup.groups = groups_of_two_optimizers();
  if (form.storage == FSDP_MAIN_SPLIT16)
    for (const size_t g : {0, 1}) setup.groups[g].options.main_storage = FSDP_MAIN_FLOAT32;
  return setup;
}

inline std::vector<float> read_state(const Rank &rank, size_t g, size_t p, const char *name) {
  std::vector<float> values(rank.def(g).params[p].count());
  FSDP(fsdp_read_state(rank.groups[g], p, name, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
  return values;
}

// The weights and the states that each parameter has, whole.
inline std::vector<std::vector<float>> everything_of_two_optimizers(const Rank &rank) {
  std::vector<std::vector<float>> all = rank.read_all();
  for (size_t g = 0; g < rank.groups.size(); ++g)
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
      if (rank.def(g).params[p].flags & FSDP_PARAM_FROZEN) continue;
      if (rank.def(g).params[p].by_caller()) {
        all.push_back(read_state(rank, g, p, "momentum"));
        continue;
      }
      for (const char *state : states) all.push_back(read_state(rank, g, p, state));
    }
  return all;
}

}  // namespace harness
