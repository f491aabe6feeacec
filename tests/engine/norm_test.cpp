// SPDX-License-Identifier: Apache-2.0
// Norms over further meshes: of models that are parts of one network, for example stages of a pipeline.
#include <gtest/gtest.h>

#include <cmath>

#include "harness.h"

using namespace harness;

namespace {

// Ranks 0 and 1 have a model, the others one each or together.
Scenario stage_of(uint32_t rank, uint32_t ranks, fsdp_strategy strategy, std::vector<uint32_t> &members) {
  Scenario own = scenario_of(strategy, ranks);
  members = rank < 2     ? std::vector<uint32_t>{0, 1}
            : ranks == 3 ? std::vector<uint32_t>{2}
                         : std::vector<uint32_t>{2, 3};
  own.mesh.ranks = members.data();
  own.mesh.rank_count = static_cast<uint32_t>(members.size());
  own.mesh.shard_size = own.mesh.rank_count;
  return own;
}

// Every rank of two stages with the gradients of a finished step.
void run_stages(uint32_t ranks, fsdp_strategy strategy, const std::function<void(Rank &)> &body) {
  run_threads(scenario_of(strategy, ranks), [&](uint32_t r, fsdp_context *context) {
    std::vector<uint32_t> members;
    const Scenario own = stage_of(r, ranks, strategy, members);
    Rank rank(context, own);
    rank.load();
    reduce_all(rank, r < 2 ? 1 : 1000);
    FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
    body(rank);
    FSDP(fsdp_close_context(context));
  });
}

int32_t blamed(const Rank &rank) {
  fsdp_error error = FSDP_ERROR_INIT;
  FSDP(fsdp_get_last_error(rank.context, &error));
  return error.rank;
}

// Two models of two ranks each, say stages of a pipeline: gradients of 1 and of 2.
TEST(Norms, OverAFurtherMeshAddUp) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
  uint64_t elements = 0;
  for (const GroupDef &group : scenario.groups)
    for (const ParamDef &param : group.params) elements += param.flags & FSDP_PARAM_FROZEN ? 0 : param.count();
  const double expected = std::sqrt(static_cast<double>(elements) * (1 + 4));
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Scenario own = scenario;
    const std::vector<uint32_t> stage = r < 2 ? std::vector<uint32_t>{0, 1} : std::vector<uint32_t>{2, 3};
    own.mesh.ranks = stage.data();
    own.mesh.rank_count = 2;
    own.mesh.shard_size = 2;
    Rank rank(context, own);
    rank.load();
    fsdp_mesh *stages = make_mesh(context, {r % 2, r % 2 + 2});
    reduce_all(rank, r < 2 ? 1.0f : 2.0f);
    FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
    double norm = 0, last = 0, alone = 0;
    require_error(fsdp_get_last_norm(rank.model, &last), FSDP_INVALID_STATE, {"no norm was measured"});
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &alone));
    REQUIRE(std::abs(alone / std::sqrt(static_cast<double>(elements)) - (r < 2 ? 1 : 2)) < 1e-12);
    FSDP(fsdp_get_grad_norm(rank.model, stages, nullptr, nullptr));
    FSDP(fsdp_get_last_norm(rank.model, &last));
    REQUIRE(std::abs(last / expected - 1) < 1e-12);
    FSDP(fsdp_clip_grads(rank.model, stages, expected / 2, nullptr, &norm));
    REQUIRE(norm == last);
    for (const fsdp_shard &shard : rank.shards())
      for (uint64_t i = 0; i < shard.element_count; ++i) REQUIRE(main_grad(shard)[i] == (r < 2 ? 0.5f : 1.0f));
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    fsdp_destroy_mesh(stages);
    FSDP(fsdp_close_context(context));
  });
}

// Each rank's own call succeeds, so only the result of the scaling shows the difference.
TEST(Norms, OverOtherFurtherMeshesScaleDifferently) {
  std::vector<std::vector<float>> weights(3);
  run_stages(3, FSDP_STRATEGY_NO_SHARD, [&](Rank &rank) {
    fsdp_mesh *further = rank.rank == 1 ? nullptr : make_mesh(rank.context, {0, 2});
    double norm = 0;
    FSDP(fsdp_clip_grads(rank.model, further, 1.0, nullptr, &norm));
    const fsdp_status status = fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr);
    if (rank.rank == 2) {
      FSDP(status);
    } else {
      require_error(status, FSDP_MISMATCH,
                    {"scaling of gradients number 1", "on rank 1", "on rank 0", "max_norm 1 at a norm of "});
      REQUIRE(blamed(rank) == 1);
      FSDP(fsdp_discard_step(rank.model, nullptr));
    }
    weights[rank.rank] = rank.read(0, 0);
    fsdp_destroy_mesh(further);
  });
  // Ranks 0 and 1 have discarded the step, rank 2 has made it.
  for (size_t i = 0; i < weights[0].size(); ++i) {
    const float loaded = initial_weight(0, i);
    ASSERT_EQ(weights[0][i], loaded);
    ASSERT_EQ(weights[1][i], loaded);
    ASSERT_NEAR(weights[2][i], loaded - 0.1f, 1e-4f);
  }
}

TEST(Norms, OfStagesThatClipAndStagesThatAskDoNotMix) {
  run_stages(4, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, [&](Rank &rank) {
    const uint32_t first = rank.rank % 2;
    fsdp_mesh *further = make_mesh(rank.context, {first, first + 2});
    const fsdp_status status = rank.rank < 2 ? fsdp_get_grad_norm(rank.model, further, nullptr, nullptr)
                                             : fsdp_clip_grads(rank.model, further, 0.5, nullptr, nullptr);
    const std::string both = first ? "rank 3 asked for max_norm 0.5, rank 1 for the norm alone"
                                   : "rank 2 asked for max_norm 0.5, rank 0 for the norm alone";
    require_error(status, FSDP_MISMATCH, {both, "nothing was scaled"});
    REQUIRE(blamed(rank) == static_cast<int32_t>(first + 2));
    for (const fsdp_shard &shard : rank.shards())
      for (uint64_t i = 0; i < shard.element_count; ++i) REQUIRE(main_grad(shard)[i] == (rank.rank < 2 ? 1 : 1000));
    FSDP(fsdp_clip_grads(rank.model, further, 0.5, nullptr, nullptr));
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr));
    fsdp_destroy_mesh(further);
  });
}

// The other stage waits for a norm that this stage cannot give: it gets the reason, and all ranks can repeat the call.
TEST(Norms, OfAStageThatDisagreesAreRefusedOnAllStages) {
  for (const uint32_t odd : {1u, 2u}) {
    run_stages(4, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, [&](Rank &rank) {
      const uint32_t first = rank.rank % 2;
      fsdp_mesh *further = make_mesh(rank.context, {first, first + 2});
      const std::string text = odd == 1 ? "rank 1 asked for max_norm 2, rank 0 for max_norm 1; nothing was scaled"
                                        : "rank 3 asked for max_norm 1, rank 2 for max_norm 2; nothing was scaled";
      require_error(fsdp_clip_grads(rank.model, further, rank.rank == odd ? 2 : 1, nullptr, nullptr), FSDP_MISMATCH,
                    {text});
      REQUIRE(blamed(rank) == (odd == 1 ? 1 : 3));
      double norm = 0, again = 0;
      FSDP(fsdp_get_grad_norm(rank.model, further, nullptr, &norm));
      FSDP(fsdp_clip_grads(rank.model, further, 1, nullptr, &again));
      REQUIRE(norm == again);
      FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr));
      fsdp_destroy_mesh(further);
    });
  }
}

// Two ranks of one model in the mesh: its norm would count twice.
TEST(Norms, RefuseAMeshWithTwoRanksOfOneModel) {
  run_stages(3, FSDP_STRATEGY_NO_SHARD, [](Rank &rank) {
    fsdp_mesh *all = make_mesh(rank.context, {0, 1, 2});
    double norm = 7;
    if (rank.rank < 2) {
      require_error(fsdp_get_grad_norm(rank.model, all, nullptr, &norm), FSDP_INVALID_ARGUMENT,
                    {"rank " + std::to_string(1 - rank.rank), "would count twice"});
      REQUIRE(norm == 7);
    }
    fsdp_destroy_mesh(all);
    FSDP(fsdp_discard_step(rank.model, nullptr));
  });
}

// Before anything is computed from both.
TEST(Norms, OfGradientsThatRanksScaledDifferentlyAreRefused) {
  for (const bool clips : {false, true}) {
    const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 3);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      finish_step(rank, 0);
      FSDP(fsdp_scale_grads(rank.model, r == 2 ? 3 : 2, nullptr));
      double norm = 0;
      require_error(clips ? fsdp_clip_grads(rank.model, nullptr, 1, nullptr, &norm)
                          : fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm),
                    FSDP_MISMATCH, {"rank 2 has scaled its gradients otherwise than rank 0", "fsdp_discard_step"});
      REQUIRE(blamed(rank) == 2);
      FSDP(fsdp_discard_step(rank.model, nullptr));
      clean_step(rank, 1);
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
