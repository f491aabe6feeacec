// SPDX-License-Identifier: Apache-2.0
// Training in which a step leaves some parameters as they are, in three ways that must give the same bits. The
// parameters are not trained (fsdp_set_param_trainable), or skipped without a gradient (FSDP_MISSING_GRAD_SKIP). Or
// they are given zeros, and their weights and states are written back after the step; this way does not use the other
// two.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness.h"

namespace harness {

enum class Way { untrained, skipped, restored };

using Values = std::vector<std::vector<float>>;  // one a parameter, in the order of declaration

// The values and states of one rank after every step.
struct KeptTraining {
  std::vector<Values> weights, averages, squares, grads;
  std::vector<std::vector<double>> norms;  // of the model, then of each parameter
  std::vector<Stats> stats;
  std::string error;
};

// Returns whether the step leaves this parameter as it is.
using Keeps = std::function<bool(uint32_t step, uint32_t ordinal)>;

std::vector<KeptTraining> train_kept(Scenario setup, Way way, const Keeps &keeps);
// Describes how the first result differs from the second one, which was `restored`; empty if they are equal.
std::string kept_difference(const Scenario &setup, const std::vector<KeptTraining> &found,
                            const std::vector<KeptTraining> &expected, const Keeps &keeps);

// Meshes and options under which both must hold, a name for each.
struct KeptSetup {
  std::string name;
  Scenario scenario;
};
std::vector<KeptSetup> kept_setups();
// Runs every fifth of these setups. Parameters that are kept in this way must equal those that are written back.
void expect_as_restored(Way way, const Keeps &keeps);

}  // namespace harness
