// SPDX-License-Identifier: Apache-2.0
// Models with dense layers and experts, whose groups have meshes of their own. All gradients are exact in fp32, and so
// are their sums and squares in any order: one process that has all parameters trains to the same bits.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "harness.h"

namespace harness {

// How the ranks of a job divide a model. Rank r has the experts number r % experts, and the part number r % tensors of
// each tensor-parallel parameter.
struct Mixture {
  Scenario job;          // the context, the model's options, and how many micro-batches and steps there are
  uint32_t experts = 2;  // number of expert meshes
  uint32_t tensors = 1;  // number of meshes of dense groups; 1: dense groups are on the model's mesh
  uint32_t dense_replicas = 1, expert_replicas = 1;
  fsdp_outer_strategy expert_outer = 0;
  fsdp_strategy expert_strategy = 0;     // 0: the model's
  fsdp_quantization quantization = 0;    // of the experts, whose weights are bf16 then
  fsdp_main_storage expert_storage = 0;  // of the experts; 0: the model's
};

// What a rank has seen: numbers of the model, and main gradients and weights by the names that one process uses.
struct MixtureOutcome {
  std::vector<double> norms;  // one a step
  std::vector<double> param_norms;
  uint64_t zeros = 0;
  std::vector<std::pair<std::string, std::vector<float>>> grads, weights;
  Stats stats;
  Memory memory;
};

inline constexpr uint32_t mixture_layers = 2;

// A rank of the job that has the model. It owns the meshes.
class MixtureRank {
 public:
  MixtureRank(fsdp_context *context, const Mixture &mixture, uint32_t rank);
  Rank &model() { return *rank_; }
  void load();
  // The gradients of all layers, from the last one back, in which experts and dense layers take turns.
  void backward(uint32_t step, uint32_t microbatch);
  void give(size_t group, uint32_t step, uint32_t microbatch);
  MixtureOutcome train();
  // The name of a parameter in the model of one process.
  std::string full_name(size_t group, size_t param) const;

 private:
  using Mesh = std::unique_ptr<fsdp_mesh, decltype(&fsdp_destroy_mesh)>;
  fsdp_mesh *make_mesh(fsdp_context *context, uint32_t parts, uint32_t replicas);

  const Mixture &mixture_;
  uint32_t number_;
  Scenario setup_;
  std::vector<Mesh> meshes_;
  std::unique_ptr<Rank> rank_;
  std::deque<std::vector<float>> given_;  // kept alive, because a GPU copies gradients later
};

std::vector<MixtureOutcome> train_mixture(const Mixture &mixture);
// Trains the same model in one process, where each part of a tensor and each mesh's experts are a group.
MixtureOutcome train_alone(const Mixture &mixture);
// Describes the first difference between the ranks' results and those of one process; empty if there is none.
std::string mixture_difference(const std::vector<MixtureOutcome> &seen, const MixtureOutcome &alone);

}  // namespace harness
