// SPDX-License-Identifier: Apache-2.0
// A model of a few equal matrices in pieces.
#pragma once

#include "harness.h"

namespace harness {

inline constexpr uint64_t matrix_bytes = 64 * 32 * sizeof(float);

// Four matrices of 64 x 32 in the pieces 0, 1, 1 and 2.
inline std::vector<GroupDef> four_matrices(uint32_t groups) {
  std::vector<GroupDef> defs;
  for (uint32_t g = 0; g < groups; ++g) {
    GroupDef def{"layer." + std::to_string(g), {}};
    for (uint32_t p = 0; p < 4; ++p) {
      def.params.push_back({def.name + ".w" + std::to_string(p), {64, 32}});
      def.params.back().piece = (p + 1) / 2;
    }
    defs.push_back(def);
  }
  return defs;
}

inline Scenario four_scenario(fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED, uint32_t groups = 1) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, mode);
  scenario.groups = four_matrices(groups);
  scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
  return scenario;
}

inline void each_rank(const Scenario &scenario, const std::function<void(Rank &)> &body) {
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    body(rank);
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace harness
