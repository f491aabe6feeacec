// SPDX-License-Identifier: Apache-2.0
#include "mixture.h"

#include <algorithm>
#include <map>

namespace harness {
namespace {

// A parameter of which each mesh has a box, one after the other in rows.
ParamDef box(std::string name, uint64_t rows, uint32_t part, uint32_t parts) {
  ParamDef param{std::move(name), {rows, 4}};
  if (parts == 1) return param;
  param.global_shape = {rows * parts, 4};
  param.global_offset = {rows * part, 0};
  return param;
}

// Tensor-parallel ranks have the same gain, so it is one box in all of their meshes.
ParamDef copy(std::string name, uint64_t rows, uint32_t parts) {
  ParamDef param{std::move(name), {rows}};
  if (parts > 1) param.global_shape = {rows}, param.global_offset = {0};
  return param;
}

GroupDef dense_layer(uint32_t layer, uint32_t part, uint32_t parts) {
  const std::string name = "dense." + std::to_string(layer);
  return {name, {box(name + ".w", 10, part, parts), copy(name + ".gain", 5, parts)}};
}

// The scale is no box: each mesh has a name of its own.
GroupDef expert_layer(const Mixture &mixture, uint32_t layer, uint32_t part) {
  const std::string name = "experts." + std::to_string(layer);
  GroupDef group{name,
                 {box(name + ".w", 6, part, mixture.experts), {name + "." + std::to_string(part) + ".scale", {3}}}};
  if (mixture.quantization || mixture.expert_storage) {
    ParamDef &weights = group.params[0];
    weights.shape = {128, 256}, weights.dtype = FSDP_BFLOAT16, weights.quantization = mixture.quantization;
    if (mixture.experts > 1)
      weights.global_shape = {128 * mixture.experts, 256}, weights.global_offset = {128 * part, 0};
    group.params[1].dtype = FSDP_BFLOAT16;
  }
  group.options.strategy = mixture.expert_strategy, group.options.main_storage = mixture.expert_storage;
  return group;
}

constexpr uint32_t groups_per_layer = 2;

bool is_expert(size_t group) { return group % groups_per_layer == 1; }

// Multiples of 1/4 below 2. They depend on what one process calls the parameter.
float exact_gradient(const std::string &name, uint32_t rank, uint32_t step, uint32_t microbatch, uint64_t element) {
  uint32_t seed = step * 7 + microbatch * 3;
  for (const char c : name) seed = seed * 31 + static_cast<unsigned char>(c);
  return static_cast<float>(static_cast<int64_t>((7 * element + 3 * rank + seed % 5) % 11) - 5) / 4;
}

std::vector<float> gradient_of(const std::string &name, uint64_t count, uint32_t rank, uint32_t step,
                               uint32_t microbatch) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = exact_gradient(name, rank, step, microbatch, i);
  return values;
}

std::vector<float> weights_of(uint64_t count) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = (static_cast<float>(3 * i % 17) - 8) / 8;
  return values;
}

// The name of a part: that of the whole, and its number if there are several.
std::string part_name(const std::string &name, uint32_t part, uint32_t parts) {
  return parts > 1 ? name + "#" + std::to_string(part) : name;
}

void step_adamw(Rank &rank) {
  fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
  adamw.weight_decay = rank.setup.weight_decay;
  FSDP(fsdp_step_adamw(rank.model, 1e-2, &adamw, nullptr));
}

std::vector<float> read_grad(Rank &rank, size_t group, size_t param) {
  std::vector<float> values(rank.def(group).params[param].count());
  FSDP(fsdp_read_grad(rank.groups[group], param, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
  return values;
}

}  // namespace

fsdp_mesh *MixtureRank::make_mesh(fsdp_context *context, uint32_t parts, uint32_t replicas) {
  std::vector<uint32_t> ranks;
  for (uint32_t r = number_ % parts; r < mixture_.job.ranks; r += parts) ranks.push_back(r);
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  options.ranks = ranks.data(), options.rank_count = static_cast<uint32_t>(ranks.size());
  options.replicate_size = replicas;
  fsdp_mesh *mesh = nullptr;
  FSDP(fsdp_create_mesh(context, &options, &mesh));
  meshes_.emplace_back(mesh, fsdp_destroy_mesh);
  return mesh;
}

MixtureRank::MixtureRank(fsdp_context *context, const Mixture &mixture, uint32_t rank)
    : mixture_(mixture), number_(rank), setup_(mixture.job) {
  setup_.groups.clear();
  setup_.mesh.replicate_size = mixture.tensors == 1 ? mixture.dense_replicas : 0;
  fsdp_mesh *const experts = make_mesh(context, mixture.experts, mixture.expert_replicas);
  fsdp_mesh *const dense = mixture.tensors > 1 ? make_mesh(context, mixture.tensors, mixture.dense_replicas) : nullptr;
  for (uint32_t l = 0; l < mixture_layers; ++l) {
    setup_.groups.push_back(dense_layer(l, rank % mixture.tensors, mixture.tensors));
    setup_.groups.back().options.mesh = dense;
    setup_.groups.push_back(expert_layer(mixture, l, rank % mixture.experts));
    fsdp_group_options &options = setup_.groups.back().options;
    options.mesh = experts, options.outer_strategy = mixture.expert_outer;
  }
  rank_ = std::make_unique<Rank>(context, setup_);
}

std::string MixtureRank::full_name(size_t group, size_t param) const {
  const std::string &name = setup_.groups[group].params[param].name;
  if (param > 0) return name;  // copies are one parameter, and names of scales differ
  return is_expert(group) ? part_name(name, number_ % mixture_.experts, mixture_.experts)
                          : part_name(name, number_ % mixture_.tensors, mixture_.tensors);
}

void MixtureRank::load() {
  if (rank_->stats().version > 0) FSDP(fsdp_begin_update(rank_->model, nullptr));
  for (size_t g = 0; g < rank_->groups.size(); ++g)
    for (size_t p = 0; p < rank_->def(g).params.size(); ++p) {
      const auto weights = weights_of(rank_->def(g).params[p].count());
      FSDP(fsdp_load_param(rank_->groups[g], p, weights.data(), FSDP_FLOAT32, weights.size(), FSDP_EVERY_RANK, 0));
    }
  FSDP(fsdp_publish_weights(rank_->model, nullptr));
}

// Tensor-parallel ranks see the same data, so that the copies of a parameter stay equal.
void MixtureRank::give(size_t group, uint32_t step, uint32_t microbatch) {
  const uint32_t data = is_expert(group) ? number_ : number_ / mixture_.tensors;
  for (size_t p = rank_->def(group).params.size(); p-- > 0;) {
    const std::vector<float> &grad = given_.emplace_back(
        gradient_of(full_name(group, p), rank_->def(group).params[p].count(), data, step, microbatch));
    FSDP(fsdp_put_grad(rank_->groups[group], p, grad.data(), FSDP_FLOAT32, grad.size(), 0, nullptr));
  }
  FSDP(fsdp_reduce_grad(rank_->groups[group], microbatch + 1 == setup_.microbatches ? FSDP_LAST : 0, nullptr));
}

void MixtureRank::backward(uint32_t step, uint32_t microbatch) {
  for (size_t g = rank_->groups.size(); g-- > 0;) {
    FSDP(fsdp_unshard(rank_->groups[g], FSDP_BACKWARD, 0, nullptr));
    FSDP(fsdp_reshard(rank_->groups[g], FSDP_BACKWARD, 0, nullptr));
    give(g, step, microbatch);
  }
}

MixtureOutcome MixtureRank::train() {
  MixtureOutcome seen;
  load();
  for (uint32_t step = 0; step < setup_.steps; ++step) {
    for (uint32_t m = 0; m < setup_.microbatches; ++m) {
      forward(*rank_, nullptr);
      backward(step, m);
    }
    FSDP(fsdp_finish_grads(rank_->model, 1.0, 0, nullptr));
    FSDP(fsdp_count_zero_grads(rank_->model, nullptr, &seen.zeros));
    seen.param_norms.assign(2 * rank_->groups.size(), 0);
    FSDP(fsdp_get_param_grad_norms(rank_->model, nullptr, seen.param_norms.data(), seen.param_norms.size()));
    FSDP(fsdp_clip_grads(rank_->model, nullptr, 1.5, nullptr, &seen.norms.emplace_back()));
    seen.grads.clear();
    for (size_t g = 0; g < rank_->groups.size(); ++g)
      for (size_t p = 0; p < 2; ++p) seen.grads.emplace_back(full_name(g, p), read_grad(*rank_, g, p));
    step_adamw(*rank_);
  }
  FSDP(fsdp_begin_update(rank_->model, nullptr));
  for (size_t g = 0; g < rank_->groups.size(); ++g)
    for (size_t p = 0; p < 2; ++p) seen.weights.emplace_back(full_name(g, p), rank_->read(g, p));
  FSDP(fsdp_publish_weights(rank_->model, nullptr));
  FSDP(fsdp_check_replicas(rank_->model, 0, nullptr));
  seen.stats = rank_->stats();
  seen.memory = memory_of(rank_->model, number_);
  return seen;
}

std::vector<MixtureOutcome> train_mixture(const Mixture &mixture) {
  std::vector<MixtureOutcome> seen(mixture.job.ranks);
  run_threads(mixture.job, [&](uint32_t r, fsdp_context *context) {
    {
      MixtureRank rank(context, mixture, r);
      seen[r] = rank.train();
    }
    FSDP(fsdp_close_context(context));
  });
  return seen;
}

namespace {

// The groups of one process in the order of layers, and of each group the ranks whose gradients it adds.
struct Alone {
  Scenario setup;
  std::vector<std::vector<uint32_t>> givers;  // by group; what a rank gives depends on these numbers
};

Alone divide(const Mixture &mixture) {
  Alone alone{scenario_of(FSDP_STRATEGY_NO_SHARD, 1), {}};
  alone.setup.steps = mixture.job.steps, alone.setup.microbatches = mixture.job.microbatches;
  alone.setup.weight_decay = mixture.job.weight_decay;
  alone.setup.model.grad_op = FSDP_GRAD_OP_SUM;
  alone.setup.model.optimizer = mixture.job.model.optimizer;
  alone.setup.model.rounding_seed = mixture.job.model.rounding_seed;
  alone.setup.groups.clear();
  const auto add = [&](GroupDef group, std::string name, bool has_second, const std::vector<uint32_t> &givers) {
    for (ParamDef &param : group.params) param.global_shape.clear(), param.global_offset.clear();
    group.params[0].name = group.name = std::move(name);
    if (!has_second) group.params.pop_back();
    alone.setup.groups.push_back(std::move(group));
    alone.givers.push_back(givers);
  };
  for (uint32_t l = 0; l < mixture_layers; ++l) {
    for (uint32_t t = 0; t < mixture.tensors; ++t) {
      std::vector<uint32_t> givers;
      for (uint32_t r = 0; r < mixture.job.ranks / mixture.tensors; ++r) givers.push_back(r);
      GroupDef group = dense_layer(l, t, mixture.tensors);
      const std::string name = part_name(group.params[0].name, t, mixture.tensors);
      add(std::move(group), name, t == 0, givers);
    }
    for (uint32_t e = 0; e < mixture.experts; ++e) {
      std::vector<uint32_t> givers;
      for (uint32_t r = e; r < mixture.job.ranks; r += mixture.experts) givers.push_back(r);
      GroupDef group = expert_layer(mixture, l, e);
      group.options.strategy = 0;
      const std::string name = part_name(group.params[0].name, e, mixture.experts);
      add(std::move(group), name, true, givers);
    }
  }
  return alone;
}

void give_alone(Rank &rank, const Mixture &mixture, const Alone &alone, uint32_t step,
                std::deque<std::vector<float>> &given) {
  for (size_t g = rank.groups.size(); g-- > 0;) {
    for (size_t p = rank.def(g).params.size(); p-- > 0;) {
      const ParamDef &param = rank.def(g).params[p];
      std::vector<float> &sum = given.emplace_back(param.count());
      for (const uint32_t giver : alone.givers[g])
        for (uint32_t m = 0; m < mixture.job.microbatches; ++m)
          for (uint64_t i = 0; i < sum.size(); ++i) sum[i] += exact_gradient(param.name, giver, step, m, i);
      const float divisor = static_cast<float>(mixture.job.ranks / mixture.tensors);
      for (float &value : sum) value /= divisor;
      FSDP(fsdp_put_grad(rank.groups[g], p, sum.data(), FSDP_FLOAT32, sum.size(), 0, nullptr));
    }
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
  }
}

}  // namespace

MixtureOutcome train_alone(const Mixture &mixture) {
  MixtureOutcome seen;
  const Alone alone = divide(mixture);
  run_threads(alone.setup, [&](uint32_t, fsdp_context *context) {
    {
      Rank rank(context, alone.setup);
      size_t params = 0;
      std::deque<std::vector<float>> given;
      for (size_t g = 0; g < rank.groups.size(); ++g)
        for (size_t p = 0; p < rank.def(g).params.size(); ++p, ++params) {
          const auto weights = weights_of(rank.def(g).params[p].count());
          FSDP(fsdp_load_param(rank.groups[g], p, weights.data(), FSDP_FLOAT32, weights.size(), FSDP_EVERY_RANK, 0));
        }
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      for (uint32_t step = 0; step < alone.setup.steps; ++step) {
        give_alone(rank, mixture, alone, step, given);
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        FSDP(fsdp_count_zero_grads(rank.model, nullptr, &seen.zeros));
        seen.param_norms.assign(params, 0);
        FSDP(fsdp_get_param_grad_norms(rank.model, nullptr, seen.param_norms.data(), params));
        FSDP(fsdp_clip_grads(rank.model, nullptr, 1.5, nullptr, &seen.norms.emplace_back()));
        seen.grads.clear();
        for (size_t g = 0; g < rank.groups.size(); ++g)
          for (size_t p = 0; p < rank.def(g).params.size(); ++p)
            seen.grads.emplace_back(rank.def(g).params[p].name, read_grad(rank, g, p));
        step_adamw(rank);
      }
      FSDP(fsdp_begin_update(rank.model, nullptr));
      for (size_t g = 0; g < rank.groups.size(); ++g)
        for (size_t p = 0; p < rank.def(g).params.size(); ++p)
          seen.weights.emplace_back(rank.def(g).params[p].name, rank.read(g, p));
      FSDP(fsdp_publish_weights(rank.model, nullptr));
    }
    FSDP(fsdp_close_context(context));
  });
  return seen;
}

std::string mixture_difference(const std::vector<MixtureOutcome> &seen, const MixtureOutcome &alone) {
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < alone.weights.size(); ++i) places[alone.weights[i].first] = i;
  for (size_t r = 0; r < seen.size(); ++r) {
    const std::string rank = "rank " + std::to_string(r) + ": ";
    if (seen[r].norms != alone.norms) return rank + "norms";
    if (seen[r].zeros != alone.zeros) return rank + "zeros";
    for (size_t i = 0; i < seen[r].weights.size(); ++i) {
      const auto &[name, weights] = seen[r].weights[i];
      const size_t place = places.at(name);
      if (weights != alone.weights[place].second) return rank + "weights of " + name;
      if (seen[r].grads[i].second != alone.grads[place].second) return rank + "main gradient of " + name;
      if (seen[r].param_norms[i] != alone.param_norms[place]) return rank + "norm of " + name;
    }
    if (seen[r].memory.role_bytes != seen[r].stats.allocated_bytes) return rank + "planned bytes";
  }
  return {};
}

}  // namespace harness
