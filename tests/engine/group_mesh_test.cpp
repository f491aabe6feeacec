// SPDX-License-Identifier: Apache-2.0
// One model whose experts have a mesh of their own: ranks 0 and 2 share the first half of them, ranks 1 and 3 the
// second half. The expected numbers are from a reference in numpy. It has the mean over all four ranks, one norm, the
// factor by which gradients are clipped to 1.5, and two steps of AdamW.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <memory>

#include "expert_layers.h"
#include "harness.h"

using namespace harness;
using namespace expert_layers;

namespace {

constexpr uint32_t all_ranks = 4, layers = 2;

using Mesh = std::unique_ptr<fsdp_mesh, decltype(&fsdp_destroy_mesh)>;

Mesh mesh_of(fsdp_context *context, const std::vector<uint32_t> &members) {
  return {make_mesh(context, members), fsdp_destroy_mesh};
}

// Every `step`th of `count` ranks, among them rank r.
std::vector<uint32_t> ranks_with(uint32_t r, uint32_t step, uint32_t count = all_ranks) {
  std::vector<uint32_t> members;
  for (uint32_t other = r % step; other < count; other += step) members.push_back(other);
  return members;
}

// A dense layer, then experts, in turn: [10, 4], and a half of [12, 4].
std::vector<GroupDef> dense_and_experts(uint32_t rank, const fsdp_mesh *mesh) {
  std::vector<GroupDef> groups;
  for (uint32_t l = 0; l < layers; ++l) {
    const std::string number = std::to_string(l);
    groups.push_back({"dense." + number, {{"dense." + number + ".w", {10, 4}}}});
    groups.push_back({"experts." + number, {{"experts." + number + ".w", {6, 4}}}});
    groups.back().params[0].global_shape = {12, 4};
    groups.back().params[0].global_offset = {6 * (rank % 2), 0};
    groups.back().options.mesh = mesh;
  }
  return groups;
}

bool is_expert(size_t group) { return group % 2 == 1; }

void visit(Rank &rank, size_t group, fsdp_phase phase, uint32_t expected = 0) {
  FSDP(fsdp_unshard(rank.groups[group], phase, 0, nullptr));
  const uint32_t found = crc_of(rank.view(group, 0, phase));
  REQUIRE(expected == 0 || found == expected);
  FSDP(fsdp_reshard(rank.groups[group], phase, 0, nullptr));
}

// The first layer has gradients; those of the other layers are zeros, so the norm is that of one layer.
std::vector<float> gradient_of(uint32_t r, size_t group) {
  if (group > 1) return std::vector<float>(is_expert(group) ? 24 : 40);
  return is_expert(group) ? expert_grad(r) : dense_grad(r);
}

void give(Rank &rank, size_t group, const std::vector<float> &grad) {
  FSDP(fsdp_put_grad(rank.groups[group], 0, grad.data(), FSDP_FLOAT32, grad.size(), 0, nullptr));
  FSDP(fsdp_reduce_grad(rank.groups[group], FSDP_LAST, nullptr));
}

void pass(Rank &rank) {
  for (size_t g = 0; g < rank.groups.size(); ++g) visit(rank, g, FSDP_FORWARD);
  for (size_t g = rank.groups.size(); g-- > 0;) {
    visit(rank, g, FSDP_BACKWARD);
    give(rank, g, gradient_of(rank.rank, g));
  }
  FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
}

uint32_t crc_of_grad(Rank &rank, size_t group) {
  std::vector<float> grad(rank.def(group).params[0].count());
  FSDP(fsdp_read_grad(rank.groups[group], 0, grad.data(), FSDP_FLOAT32, grad.size(), FSDP_EVERY_RANK, 0));
  return crc_of(grad);
}

void check_grads(Rank &rank) {
  const bool second_half = rank.rank % 2;
  REQUIRE(crc_of_grad(rank, 0) == 0xD728640F);
  REQUIRE(crc_of_grad(rank, 1) == (second_half ? 0xE8D21286 : 0xCCF2902D));
  std::vector<double> norms(rank.groups.size());
  FSDP(fsdp_get_param_grad_norms(rank.model, nullptr, norms.data(), norms.size()));
  REQUIRE(std::abs(norms[0] * norms[0] - 1.5703125) < 1e-12);
  REQUIRE(std::abs(norms[1] * norms[1] - (second_half ? 8.046875 : 7.0625)) < 1e-12);
  double norm = 0;
  FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm));
  REQUIRE(norm == 4.084077313176135);
}

void step(Rank &rank) {
  double norm = 0;
  fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
  adamw.weight_decay = 0.01;
  FSDP(fsdp_clip_grads(rank.model, nullptr, 1.5, nullptr, &norm));
  REQUIRE(norm == 4.084077313176135);
  FSDP(fsdp_step_adamw(rank.model, 1e-2, &adamw, nullptr));
}

void check_weights(Rank &rank) {
  visit(rank, 0, FSDP_EVAL, 0xADADBA91);
  visit(rank, 1, FSDP_EVAL, rank.rank % 2 ? 0xEF13B8CB : 0xC0D8F10E);
}

// Runs `body` on each rank of a model of dense layers and experts.
void run_model(const Scenario &setup, const std::function<void(Rank &)> &body, fsdp_strategy of_experts = 0) {
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    const Mesh mesh = mesh_of(context, ranks_with(r, 2));
    Scenario own = setup;
    own.groups = dense_and_experts(r, mesh.get());
    for (size_t g = 0; g < own.groups.size(); ++g)
      if (is_expert(g)) own.groups[g].options.strategy = of_experts;
    Rank rank(context, own);
    load_layers(rank);
    body(rank);
    FSDP(fsdp_close_context(context));
  });
}

// The strategy and the way of gathering change no bit, and groups may have different strategies.
TEST(GroupMeshes, DenseLayersAndExpertsTrainInTurn) {
  Sample sample(3);
  for (const fsdp_strategy dense : strategies)
    for (const fsdp_strategy experts : strategies)
      for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
        if (!sample.takes_next()) continue;
        SCOPED_TRACE(std::to_string(dense) + " and " + std::to_string(experts) + ", mode " + std::to_string(mode));
        run_model(
            scenario_of(dense, all_ranks, mode),
            [](Rank &rank) {
              for (uint32_t n = 0; n < 2; ++n) {
                pass(rank);
                check_grads(rank);
                step(rank);
              }
              check_weights(rank);
            },
            experts);
      }
}

// A factor of 1.5 / norm, as fp32 has it.
TEST(GroupMeshes, ClippingReachesAllGroups) {
  run_model(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, all_ranks), [](Rank &rank) {
    pass(rank);
    std::vector<std::vector<float>> before, after;
    const auto read = [&](std::vector<std::vector<float>> &grads) {
      for (size_t g = 0; g < 2; ++g) {
        grads.emplace_back(rank.def(g).params[0].count());
        FSDP(fsdp_read_grad(rank.groups[g], 0, grads[g].data(), FSDP_FLOAT32, grads[g].size(), FSDP_EVERY_RANK, 0));
      }
    };
    read(before);
    FSDP(fsdp_clip_grads(rank.model, nullptr, 1.5, nullptr, nullptr));
    read(after);
    for (auto &grad : before)
      for (float &x : grad) x *= std::bit_cast<float>(0x3EBC0C20u);
    REQUIRE(same_bits(before, after));
    FSDP(fsdp_step_adamw(rank.model, 1e-2, nullptr, nullptr));
  });
}

// Evaluation, more micro-batches, and steps that are discarded after some groups were reduced.
TEST(GroupMeshes, DiscardedStepsAndEvaluationChangeNothing) {
  for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    run_model(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, all_ranks, mode), [](Rank &rank) {
      for (uint32_t n = 0; n < 2; ++n) {
        for (size_t g = 0; g < rank.groups.size(); ++g) visit(rank, g, FSDP_EVAL);
        for (size_t g = rank.groups.size(); g-- > 1 + n;) give(rank, g, gradient_of(rank.rank, g));
        FSDP(fsdp_discard_step(rank.model, nullptr));
        pass(rank);
        check_grads(rank);
        step(rank);
      }
      check_weights(rank);
    });
}

// Ranks 1 and 3 do not share the group whose reduce rank 2 left out, and get the error as well.
TEST(GroupMeshes, MissingReduceOfOneRankIsNamedOnAll) {
  run_model(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, all_ranks), [](Rank &rank) {
    for (size_t g = rank.groups.size(); g-- > 0;)
      if (rank.rank != 2 || g != 1) give(rank, g, gradient_of(rank.rank, g));
    require_error(fsdp_finish_grads(rank.model, 1.0, 0, nullptr), FSDP_MISMATCH,
                  {"rank 2", "group 'experts.0' was not reduced", "fsdp_discard_step on every rank"});
    FSDP(fsdp_discard_step(rank.model, nullptr));
    for (uint32_t n = 0; n < 2; ++n) {
      pass(rank);
      check_grads(rank);
      step(rank);
    }
    check_weights(rank);
  });
}

// 16 elements of 1 and, on each of two meshes, 8 elements of 2: all squares are 80.
TEST(GroupMeshes, NormCountsTheExpertsOfAllMeshes) {
  for (const fsdp_strategy strategy : strategies)
    run_threads(scenario_of(strategy, all_ranks), [&](uint32_t r, fsdp_context *context) {
      const Mesh mesh = mesh_of(context, ranks_with(r, 2));
      Scenario setup = scenario_of(strategy, all_ranks);
      setup.groups = {{"dense", {{"dense", {16}}}}, {"experts", {{"experts." + std::to_string(r % 2), {8}}}}};
      setup.groups[1].options.mesh = mesh.get();
      Rank rank(context, setup);
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      give(rank, 1, std::vector<float>(8, 4));
      give(rank, 0, std::vector<float>(16, 1));
      FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
      double norm = 0;
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm));
      REQUIRE(norm == 8.94427190999916);
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      FSDP(fsdp_close_context(context));
    });
}

void check_info(fsdp_group *group, uint32_t shard_size, double factor) {
  fsdp_group_info info = FSDP_GROUP_INFO_INIT;
  FSDP(fsdp_get_group_info(group, &info));
  REQUIRE(info.replicate_size == 1 && info.shard_size == shard_size);
  REQUIRE(info.grad_op == FSDP_GRAD_OP_FACTOR && info.grad_factor == factor);
  REQUIRE(info.outer_strategy == FSDP_OUTER_NO_SHARD);
}

// Tensor-parallel 4 and expert-parallel 2 on 8 ranks: the meshes of dense layers and of experts cross. Each group has a
// factor of its own, since only two ranks of a dense mesh have different data. Ranks 0-3 have equal copies of the norm.
TEST(GroupMeshes, NormCountsEqualBoxesOfCrossedMeshesOnce) {
  constexpr uint32_t all = 8;
  run_threads(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, all), [&](uint32_t r, fsdp_context *context) {
    const Mesh data = mesh_of(context, {r % 4, r % 4 + 4}), expert = mesh_of(context, ranks_with(r, 2, all));
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, all);
    setup.model.grad_op = FSDP_GRAD_OP_FACTOR;
    setup.model.grad_factor = 0.5;
    setup.groups = {{"dense", {{"slices", {2, 4}}, {"norm", {5}}}}, {"experts", {{"experts", {3, 8}}}}};
    setup.groups[0].params[0].global_shape = {2, 16};
    setup.groups[0].params[0].global_offset = {0, 4 * (r % 4)};
    setup.groups[0].params[1].global_shape = {5};
    setup.groups[0].params[1].global_offset = {0};
    setup.groups[0].options.mesh = data.get();
    setup.groups[1].params[0].global_shape = {6, 8};
    setup.groups[1].params[0].global_offset = {3 * (r % 2), 0};
    setup.groups[1].options.mesh = expert.get();
    setup.groups[1].options.grad_op = FSDP_GRAD_OP_FACTOR;
    setup.groups[1].options.grad_factor = 0.25;
    Rank rank(context, setup);
    check_info(rank.groups[0], 2, 0.5);
    check_info(rank.groups[1], 4, 0.25);
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    reduce_all(rank, 1);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
    double norm = 0;
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm));
    REQUIRE(norm == std::sqrt(2.0 * 16 + 5 + 6 * 8));  // each main gradient is 1; equal copies count once
    FSDP(fsdp_step_adamw(rank.model, 1e-2, nullptr, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
