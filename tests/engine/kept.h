// SPDX-License-Identifier: Apache-2.0
// Training in which a step leaves some parameters as they are, in three ways that must come to the same bits. They are
// not trained (fsdp_set_param_trainable), they are skipped without a gradient (FSDP_MISSING_GRAD_SKIP), or they are
// given zeros, and weights and states are written back behind the step. The last one knows nothing of the others.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness.h"

namespace harness {

enum class Way { untrained, skipped, restored };

using Values = std::vector<std::vector<float>>;  // one a parameter, in the order of declaration

// Of one rank: what there was behind every step.
struct KeptTraining {
  std::vector<Values> weights, averages, squares, grads;
  std::vector<std::vector<double>> norms;  // of the model, then of each parameter
  std::vector<Stats> stats;
  std::string error;
};

// Is this parameter left as it is by that step?
using Keeps = std::function<bool(uint32_t step, uint32_t ordinal)>;

std::vector<KeptTraining> train_kept(Scenario setup, Way way, const Keeps &keeps);
// How the first differs from the other, which was `restored`; empty if it does not.
std::string kept_difference(const Scenario &setup, const std::vector<KeptTraining> &found,
                            const std::vector<KeptTraining> &expected, const Keeps &keeps);

// Meshes and options under which both must hold, a name for each.
struct KeptSetup {
  std::string name;
  Scenario scenario;
};
std::vector<KeptSetup> kept_setups();
// In each of them, of which every fifth is taken: what is left as it is in this way is as if it were written back.
void expect_as_restored(Way way, const Keeps &keeps);

}  // namespace harness
