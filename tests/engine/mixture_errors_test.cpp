// SPDX-License-Identifier: Apache-2.0
// Failures in models whose groups have meshes of their own: ranks declare or call different things, steps are
// discarded, and ranks die.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <limits>

#include "mixture.h"

using namespace harness;

namespace {

constexpr uint32_t ranks = 4;

Mixture experts_of(fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Mixture mixture;
  mixture.job = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode);
  return mixture;
}

// A group as one rank declares it.
struct Declared {
  std::vector<uint32_t> mesh;
  uint32_t replicas = 1;
  ParamDef param{"w", {6, 4}};
  fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
};

ParamDef box_of(std::vector<uint64_t> whole, std::vector<uint64_t> offset) {
  ParamDef param{"w", {6, 4}};
  param.global_shape = std::move(whole), param.global_offset = std::move(offset);
  return param;
}

// Expects the seal of such a model, which has a dense group too, to fail on every rank with the same error.
void expect_refused(const std::function<Declared(uint32_t)> &declare, fsdp_status status,
                    const std::vector<std::string> &words, bool has_dense = true) {
  run_threads(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks), [&](uint32_t r, fsdp_context *context) {
    const Declared declared = declare(r);
    fsdp_mesh_options mesh_options = FSDP_MESH_OPTIONS_INIT;
    mesh_options.ranks = declared.mesh.data(), mesh_options.rank_count = static_cast<uint32_t>(declared.mesh.size());
    mesh_options.replicate_size = declared.replicas;
    fsdp_mesh *mesh = nullptr;
    FSDP(fsdp_create_mesh(context, &mesh_options, &mesh));
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups.clear();
    if (has_dense) setup.groups.push_back({"dense", {{"dense.w", {10, 4}}}});
    setup.groups.push_back({"experts", {declared.param}, declared.options});
    setup.groups.back().options.mesh = mesh;
    {
      Rank rank(context, setup, false);
      require_error(fsdp_seal_model(rank.model), status, words);
    }
    fsdp_destroy_mesh(mesh);
    FSDP(fsdp_close_context(context));
  });
}

std::vector<uint32_t> pair_of(uint32_t rank) { return {rank % 2, rank % 2 + 2}; }

TEST(GroupMeshes, OverlapErrorNamesGroupAndBothRanks) {
  const auto declare = [](uint32_t r) {
    Declared declared;
    declared.mesh = r < 2    ? std::vector<uint32_t>{0, 1}
                    : r == 2 ? std::vector<uint32_t>{2, 1}
                             : std::vector<uint32_t>{3, 0};
    declared.param.name = "w." + std::to_string(r);
    return declared;
  };
  expect_refused(declare, FSDP_MISMATCH, {"group 'experts'", "rank 2 names the mesh {2, 1}", "rank 1", "names {0, 1}"});
}

TEST(GroupMeshes, DifferentShapesAreRefused) {
  const auto declare = [](uint32_t r) {
    Declared declared;
    declared.mesh = pair_of(r), declared.replicas = r % 2 + 1;
    return declared;
  };
  expect_refused(
      declare, FSDP_MISMATCH,
      {"group 'experts'", "rank 0 has", "(2 meshes): replicate 1 x shard 2", "rank 1 has", "replicate 2 x shard 1"});
}

TEST(GroupMeshes, ParametersOfOneNameAreBoxes) {
  const auto declare = [](uint32_t r) {
    Declared declared;
    declared.mesh = pair_of(r);
    return declared;
  };
  expect_refused(declare, FSDP_MISMATCH, {"parameter 'w'", "group 'experts'", "rank 0", "rank 1", "no box"});
}

TEST(GroupMeshes, BoxesOfOneTensorDoNotOverlap) {
  const auto declare = [](uint32_t r) {
    Declared declared;
    declared.mesh = pair_of(r);
    declared.param = box_of({12, 4}, {r % 2 ? 5u : 0u, 0});
    return declared;
  };
  expect_refused(declare, FSDP_MISMATCH, {"parameter 'w'", "[0, 0]", "[5, 0]", "overlap"});
}

TEST(GroupMeshes, BoxesAreOfTensorsOfOneShape) {
  const auto declare = [](uint32_t r) {
    Declared declared;
    declared.mesh = pair_of(r);
    declared.param = box_of({r % 2 ? 12u : 13u, 4}, {6 * (r % 2), 0});
    return declared;
  };
  expect_refused(declare, FSDP_MISMATCH, {"parameter 'w'", "[13, 4]", "[12, 4]"});
}

TEST(GroupMeshes, RanksOfOneMeshHaveTheSameNames) {
  const auto declare = [](uint32_t r) {
    Declared declared;
    declared.mesh = pair_of(r);
    declared.param.name = "w." + std::to_string(r);
    return declared;
  };
  expect_refused(declare, FSDP_MISMATCH, {"w.0", "w.2", "rank 0", "rank 2"});
}

// Copies, or parts that no dense group accompanies, are those of tensor-parallel ranks.
TEST(GroupMeshes, MeanIsRefusedForTensorParallelRanks) {
  const auto copies = [](uint32_t r) {
    Declared declared;
    declared.mesh = pair_of(r);
    declared.param = box_of({6, 4}, {0, 0});
    return declared;
  };
  const auto parts = [](uint32_t r) {
    Declared declared;
    declared.mesh = pair_of(r);
    declared.param = box_of({12, 4}, {6 * (r % 2), 0});
    return declared;
  };
  const std::vector<std::string> words{"group 'experts'", "'w'", "FSDP_GRAD_OP_MEAN", "4 ranks", "FSDP_GRAD_OP_FACTOR"};
  expect_refused(copies, FSDP_INVALID_ARGUMENT, words);
  expect_refused(parts, FSDP_INVALID_ARGUMENT, words, false);
}

TEST(GroupMeshes, Fp8WithOneScaleIsRefused) {
  const auto declare = [](uint32_t r) {
    Declared declared;
    declared.mesh = pair_of(r);
    declared.param = quantized(box_of({12, 4}, {6 * (r % 2), 0}), FSDP_QUANTIZE_FP8);
    declared.param.dtype = FSDP_BFLOAT16;
    return declared;
  };
  expect_refused(declare, FSDP_INVALID_ARGUMENT, {"parameter 'w'", "group 'experts'", "FSDP_QUANTIZE_FP8_BLOCK"});
}

// Such slices are legal with a mean if nothing is trained.
TEST(GroupMeshes, FrozenCopiesNeedNoFactor) {
  run_threads(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks), [](uint32_t r, fsdp_context *context) {
    fsdp_mesh *const mesh = make_mesh(context, pair_of(r));
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups = {{"dense", {{"dense.w", {10, 4}}}}, {"base", {box_of({6, 4}, {0, 0})}}};
    setup.groups[1].params[0].flags = FSDP_PARAM_FROZEN;
    setup.groups[1].options.mesh = mesh;
    { const Rank rank(context, setup); }
    fsdp_destroy_mesh(mesh);
    FSDP(fsdp_close_context(context));
  });
}

// Ranks 0 and 2 have one mesh for both groups, and ranks 1 and 3 name theirs in two orders.
TEST(GroupMeshes, TwoGroupsMayShareAMeshOnSomeRanksOnly) {
  run_threads(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks), [](uint32_t r, fsdp_context *context) {
    fsdp_mesh *const mesh = make_mesh(context, pair_of(r));
    fsdp_mesh *const other = make_mesh(context, r % 2 ? std::vector<uint32_t>{3, 1} : pair_of(r));
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    const std::string part = std::to_string(r % 2);
    setup.groups = {{"dense", {{"dense.w", {10, 4}}}}, {"a", {{"a." + part, {6, 4}}}}, {"b", {{"b." + part, {6, 4}}}}};
    setup.groups[1].options.mesh = mesh, setup.groups[2].options.mesh = other;
    {
      Rank rank(context, setup);
      rank.load();
      for (size_t g = 3; g-- > 0;) {
        put_all(rank, g, static_cast<float>(r));
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
      std::vector<float> grad(24);
      FSDP(fsdp_read_grad(rank.groups[2], 0, grad.data(), FSDP_FLOAT32, 24, FSDP_EVERY_RANK, 0));
      REQUIRE(grad == std::vector<float>(24, r % 2 ? 1.0f : 0.5f));
      update(rank);
      const Memory memory = memory_of(rank.model, r);
      REQUIRE(memory.role_bytes == rank.stats().allocated_bytes);
      uint64_t bytes = 0;
      require_error(fsdp_get_role_bytes(rank.model, FSDP_ROLE_ALL, (r + 1) % 4, &bytes), FSDP_INVALID_ARGUMENT,
                    {"rank " + std::to_string((r + 1) % 4), "in a planning context of that rank"});
    }
    fsdp_destroy_mesh(mesh), fsdp_destroy_mesh(other);
    FSDP(fsdp_close_context(context));
  });
}

TEST(GroupMeshes, RefusedBoxOnSomeRanksFailsTheSealOnAll) {
  const auto declare = [](uint32_t r) {
    Declared declared;
    declared.mesh = pair_of(r);
    declared.param = quantized({"w." + std::to_string(r % 2), {128, 64}}, FSDP_QUANTIZE_MXFP8);
    declared.param.dtype = FSDP_BFLOAT16;
    declared.param.flags = FSDP_PARAM_FROZEN;
    declared.param.global_shape = {512, 64};
    declared.param.global_offset = {r % 2 ? 16u : 256u, 0};  // 16 cuts a block of 32 rows
    return declared;
  };
  expect_refused(declare, FSDP_INVALID_ARGUMENT, {"rank 1", "w.1"});
}

TEST(GroupMeshes, MissingMeshNamesBothRanks) {
  run_threads(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks), [](uint32_t r, fsdp_context *context) {
    fsdp_mesh *const mesh = make_mesh(context, pair_of(r));
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups = {{"experts", {{"w", {6, 4}}}}};
    if (r != 3) setup.groups[0].options.mesh = mesh;
    {
      Rank rank(context, setup, false);
      require_error(fsdp_seal_model(rank.model), FSDP_MISMATCH,
                    {"rank 0 has group 'experts', mesh 1 (2 meshes): replicate 1 x shard 2",
                     "rank 3 has group 'experts', mesh 1 (1 mesh): replicate 1 x shard 4"});
    }
    fsdp_destroy_mesh(mesh);
    FSDP(fsdp_close_context(context));
  });
}

TEST(GroupMeshes, EachWrongOptionIsRefusedWithItsReason) {
  run_threads(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks), [](uint32_t r, fsdp_context *context) {
    fsdp_mesh *const own = make_mesh(context, pair_of(r));
    fsdp_model_options model_options = FSDP_MODEL_OPTIONS_INIT;
    model_options.mesh = own;
    fsdp_model *model = nullptr;
    FSDP(fsdp_create_model(context, &model_options, &model));
    fsdp_mesh *const wide = make_mesh(context, {0, 1, 2, 3});
    const auto refuse = [&](const fsdp_group_options &options, const std::vector<std::string> &words) {
      fsdp_group *group = nullptr;
      require_error(fsdp_create_group(model, "g", nullptr, 0, sizeof(fsdp_param), &options, &group),
                    FSDP_INVALID_ARGUMENT, words);
      REQUIRE(group == nullptr);
    };
    fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
    options.mesh = wide;
    refuse(options, {"group 'g'", "rank " + std::to_string(1 - r % 2), "not in the model's mesh"});
    options.mesh = own, options.outer_strategy = FSDP_OUTER_OPTIM;
    refuse(options, {"fsdp_group_options.outer_strategy", "replicate_size"});
    options.outer_strategy = 0, options.grad_op = FSDP_GRAD_OP_FACTOR;
    refuse(options, {"fsdp_group_options.grad_factor", "not 0"});
    options.grad_factor = std::numeric_limits<double>::infinity();
    refuse(options, {"fsdp_group_options.grad_factor"});
    options.grad_op = 9;
    refuse(options, {"fsdp_group_options.grad_op", "9"});
    fsdp_destroy_model(model);
    fsdp_destroy_mesh(own), fsdp_destroy_mesh(wide);
    FSDP(fsdp_close_context(context));
  });
}

TEST(GroupMeshes, GroupsTellTheirShapeAndFactor) {
  Mixture mixture = experts_of();
  mixture.job.model.outer_strategy = FSDP_OUTER_OPTIM;
  mixture.dense_replicas = 2;
  run_threads(mixture.job, [&](uint32_t r, fsdp_context *context) {
    {
      MixtureRank rank(context, mixture, r);
      fsdp_group_info info = FSDP_GROUP_INFO_INIT;
      FSDP(fsdp_get_group_info(rank.model().groups[0], &info));
      REQUIRE(info.replicate_size == 2 && info.shard_size == 2 && info.outer_strategy == FSDP_OUTER_OPTIM);
      FSDP(fsdp_get_group_info(rank.model().groups[1], &info));
      REQUIRE(info.replicate_size == 1 && info.shard_size == 2 && info.outer_strategy == FSDP_OUTER_NO_SHARD);
      REQUIRE(info.grad_op == FSDP_GRAD_OP_MEAN && info.grad_factor == 0.25);
      fsdp_chunk chunk = FSDP_CHUNK_INIT;
      for (const uint32_t of : pair_of(r)) FSDP(fsdp_get_chunk(rank.model().groups[1], 0, of, &chunk));
      require_error(fsdp_get_chunk(rank.model().groups[1], 0, (r + 1) % 4, &chunk), FSDP_INVALID_ARGUMENT,
                    {"rank " + std::to_string((r + 1) % 4)});
    }
    FSDP(fsdp_close_context(context));
  });
}

// ---- steps ----

// Runs `spoil` in a step whose end must fail on every rank with these words. The ranks discard it and train: their
// weights are those of a job in which nothing went wrong.
void expect_recovery(const Mixture &mixture, fsdp_status status, const std::vector<std::string> &words,
                     const std::function<void(MixtureRank &, uint32_t)> &spoil) {
  const MixtureOutcome alone = train_alone(mixture);
  std::vector<MixtureOutcome> seen(mixture.job.ranks);
  run_threads(mixture.job, [&](uint32_t r, fsdp_context *context) {
    {
      MixtureRank rank(context, mixture, r);
      rank.load();
      spoil(rank, r);
      const double began = now();
      require_error(fsdp_finish_grads(rank.model().model, 1, 0, nullptr), status, words);
      REQUIRE(now() - began < 2);
      FSDP(fsdp_discard_step(rank.model().model, nullptr));
      seen[r] = rank.train();
    }
    FSDP(fsdp_close_context(context));
  });
  EXPECT_EQ(mixture_difference(seen, alone), "");
}

TEST(MixtureSteps, ReducesInAnotherOrderAreNamedOnEveryRank) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (const uint32_t odd : {1u, 2u})
      expect_recovery(experts_of(mode), FSDP_MISMATCH,
                      {"rank " + std::to_string(odd) + " reduced group 'dense.1'", "reduced group 'experts.1'"},
                      [odd](MixtureRank &rank, uint32_t r) {
                        for (const size_t group : {3, 2}) rank.give(r == odd ? 5 - group : group, 0, 0);
                        for (const size_t group : {1, 0}) rank.give(group, 0, 0);
                      });
}

TEST(MixtureSteps, AReduceThatARankMissesIsNamedOnEveryRank) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    expect_recovery(experts_of(mode), FSDP_MISMATCH, {"rank 3: group 'experts.0' was not reduced"},
                    [](MixtureRank &rank, uint32_t r) {
                      for (size_t group = 4; group-- > 0;)
                        if (r != 3 || group != 1) rank.give(group, 0, 0);
                    });
}

TEST(MixtureSteps, AHoldThatARankKeepsIsNamedOnEveryRank) {
  const auto spoil = [](MixtureRank &rank, uint32_t r) {
    rank.backward(0, 0);
    if (r == 2) FSDP(fsdp_unshard(rank.model().groups[1], FSDP_EVAL, 0, nullptr));
  };
  expect_recovery(experts_of(), FSDP_INVALID_STATE, {"rank 2: ", "experts.0"}, spoil);
}

TEST(MixtureSteps, MayBeDiscardedAtAnyMoment) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (size_t given = 0; given <= 4; ++given) {
      const Mixture mixture = experts_of(mode);
      const MixtureOutcome alone = train_alone(mixture);
      std::vector<MixtureOutcome> seen(ranks);
      run_threads(mixture.job, [&](uint32_t r, fsdp_context *context) {
        {
          MixtureRank rank(context, mixture, r);
          rank.load();
          for (size_t group = 4; group-- > 4 - given;) rank.give(group, 1, 0);
          if (given == 4) FSDP(fsdp_finish_grads(rank.model().model, 1, 0, nullptr));
          FSDP(fsdp_discard_step(rank.model().model, nullptr));
          seen[r] = rank.train();
        }
        FSDP(fsdp_close_context(context));
      });
      EXPECT_EQ(mixture_difference(seen, alone), "") << given << " groups";
    }
}

TEST(MixtureSteps, EvaluationsChangeNothing) {
  Mixture mixture = experts_of();
  mixture.job.eval = true;
  const MixtureOutcome alone = train_alone(mixture);
  std::vector<MixtureOutcome> seen(ranks);
  run_threads(mixture.job, [&](uint32_t r, fsdp_context *context) {
    {
      MixtureRank rank(context, mixture, r);
      rank.load();
      for (size_t g = 0; g < 4; ++g) {
        FSDP(fsdp_unshard(rank.model().groups[g], FSDP_EVAL, 0, nullptr));
        REQUIRE(rank.model().view(g, 0, FSDP_EVAL)[0] == -1);
        FSDP(fsdp_reshard(rank.model().groups[g], FSDP_EVAL, 0, nullptr));
      }
      seen[r] = rank.train();
    }
    FSDP(fsdp_close_context(context));
  });
  EXPECT_EQ(mixture_difference(seen, alone), "");
}

// Ranks 1 and 3 have experts that the others do not have, and whose names these do not know from their own groups.
TEST(MixtureSteps, NumbersThatAreNotFiniteAreNamedOnEveryRank) {
  const Mixture mixture = experts_of();
  run_threads(mixture.job, [&](uint32_t r, fsdp_context *context) {
    {
      MixtureRank rank(context, mixture, r);
      rank.load();
      rank.give(3, 0, 0), rank.give(2, 0, 0);
      const float nan = std::numeric_limits<float>::quiet_NaN();
      const std::vector<float> scale(3, r == 3 ? nan : 1), weights(24, 1);
      fsdp_group *const experts = rank.model().groups[1];
      FSDP(fsdp_put_grad(experts, 1, scale.data(), FSDP_FLOAT32, scale.size(), 0, nullptr));
      FSDP(fsdp_put_grad(experts, 0, weights.data(), FSDP_FLOAT32, weights.size(), 0, nullptr));
      FSDP(fsdp_reduce_grad(experts, FSDP_LAST, nullptr));
      rank.give(0, 0, 0);
      FSDP(fsdp_finish_grads(rank.model().model, 1, 0, nullptr));
      int32_t found = 0;
      const char *name = nullptr;
      FSDP(fsdp_check_grads(rank.model().model, nullptr, &found, &name));
      REQUIRE(found == 1 && name == std::string("experts.0.1.scale"));
      double norm = 0;
      FSDP(fsdp_clip_grads(rank.model().model, nullptr, 1, nullptr, &norm));
      REQUIRE(std::isnan(norm));
      FSDP(fsdp_discard_step(rank.model().model, nullptr));
    }
    FSDP(fsdp_close_context(context));
  });
}

// No norm counts a copy of a parameter twice, but a number that is not finite is found in each.
TEST(MixtureSteps, NumbersThatAreNotFiniteAreFoundInCopies) {
  run_threads(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), [](uint32_t r, fsdp_context *context) {
    fsdp_mesh *const mesh = make_mesh(context, {r});
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    setup.groups = {{"norms", {box_of({6, 4}, {0, 0})}}};
    setup.groups[0].options.mesh = mesh;
    setup.groups[0].options.grad_op = FSDP_GRAD_OP_SUM;
    {
      Rank rank(context, setup);
      rank.load();
      put_all(rank, 0, r == 1 ? std::numeric_limits<float>::quiet_NaN() : 1.0f);
      FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr));
      FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
      int32_t found = 0;
      const char *name = nullptr;
      FSDP(fsdp_check_grads(rank.model, nullptr, &found, &name));
      REQUIRE(found == 1 && name == std::string("w"));
      FSDP(fsdp_discard_step(rank.model, nullptr));
    }
    fsdp_destroy_mesh(mesh);
    FSDP(fsdp_close_context(context));
  });
}

// Each host has one rank or two, so that meshes exchange over their outer axes alone.
TEST(MixtureSteps, ReducesOverHostsInAnotherOrderAreNamedOnEveryRank) {
  for (const uint32_t hosts : {1u, 2u}) {
    Mixture mixture = experts_of();
    mixture.job.context.ranks_per_host = hosts;
    expect_recovery(mixture, FSDP_MISMATCH, {"rank 2 reduced group 'dense.1'", "reduced group 'experts.1'"},
                    [](MixtureRank &rank, uint32_t r) {
                      for (const size_t group : {3, 2}) rank.give(r == 2 ? 5 - group : group, 0, 0);
                      for (const size_t group : {1, 0}) rank.give(group, 0, 0);
                    });
  }
}

// A rank of the other expert mesh has a gradient for its scale. That scale is another parameter, so this rank's scale
// is skipped.
TEST(MixtureSteps, GradientOfAnotherMeshDoesNotCountAsGiven) {
  run_threads(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks), [](uint32_t r, fsdp_context *context) {
    fsdp_mesh *const mesh = make_mesh(context, pair_of(r));
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups = {{"dense", {{"dense.w", {10, 4}}}}, {"experts", {{"w." + std::to_string(r % 2), {6, 4}}}}};
    setup.groups[1].params[0].missing_grad = FSDP_MISSING_GRAD_SKIP;
    setup.groups[1].options.mesh = mesh;
    {
      Rank rank(context, setup);
      rank.load();
      const std::vector<float> before = rank.read(1, 0), grad(24, 1);
      FSDP(fsdp_put_grad(rank.groups[1], 0, r == 3 ? grad.data() : nullptr, FSDP_FLOAT32, 24, 0, nullptr));
      FSDP(fsdp_reduce_grad(rank.groups[1], FSDP_LAST, nullptr));
      put_all(rank, 0, 1);
      FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr));
      FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
      update(rank);
      REQUIRE((rank.read(1, 0) == before) == (r % 2 == 0));
    }
    fsdp_destroy_mesh(mesh);
    FSDP(fsdp_close_context(context));
  });
}

// The root is a rank of the group's mesh. Data of the other mesh's root does not arrive here.
TEST(MixtureSteps, ParametersAreLoadedWithinTheirMesh) {
  for (const uint32_t hosts : {0u, 2u}) {
    Mixture mixture = experts_of();
    mixture.job.context.ranks_per_host = hosts;
    run_threads(mixture.job, [&](uint32_t r, fsdp_context *context) {
      {
        MixtureRank rank(context, mixture, r);
        rank.load();
        FSDP(fsdp_begin_update(rank.model().model, nullptr));
        const uint32_t root = r % 2 + 2;
        const std::vector<float> data(24, static_cast<float>(root));
        fsdp_group *const experts = rank.model().groups[1];
        require_error(fsdp_load_param(experts, 0, data.data(), FSDP_FLOAT32, 24, static_cast<int32_t>(5 - root), 0),
                      FSDP_INVALID_ARGUMENT, {"root " + std::to_string(5 - root), "group's mesh"});
        FSDP(fsdp_load_param(experts, 0, r == root ? data.data() : nullptr, FSDP_FLOAT32, 24,
                             static_cast<int32_t>(root), 0));
        REQUIRE(rank.model().read(1, 0) == data);
        FSDP(fsdp_publish_weights(rank.model().model, nullptr));
      }
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(MixtureSteps, ADifferenceBetweenReplicasOfOneMeshIsReportedOnAll) {
  Mixture mixture = experts_of();
  mixture.expert_replicas = 2;
  run_threads(mixture.job, [&](uint32_t r, fsdp_context *context) {
    {
      MixtureRank rank(context, mixture, r);
      rank.load();
      FSDP(fsdp_begin_update(rank.model().model, nullptr));
      for (const fsdp_shard &shard : rank.model().shards())
        if (r == 3 && shard.group == rank.model().groups[1]) main_weight(shard)[0] += 1;
      FSDP(fsdp_publish_weights(rank.model().model, nullptr));
      require_error(fsdp_check_replicas(rank.model().model, 0, nullptr), FSDP_MISMATCH,
                    {"group 'experts.0'", "rank 3", "rank 1"});
      fsdp_error error = FSDP_ERROR_INIT;
      FSDP(fsdp_get_last_error(context, &error));
      REQUIRE(error.rank == 3);
    }
    FSDP(fsdp_close_context(context));
  });
}

// ---- death ----

// Trains until a rank dies. Returns 0 if the error names that rank.
int train_until_death(const Mixture &mixture, uint32_t rank, uint32_t victim, const std::string &rendezvous) {
  constexpr uint32_t last_step = 5;
  fsdp_context *context = nullptr;
  try {
    context = join(mixture.job, rank, rendezvous);
    MixtureRank own(context, mixture, rank);
    own.load();
    for (uint32_t step = 0;; ++step) {
      forward(own.model(), nullptr);
      for (size_t group = 4; group-- > 0;) {
        own.give(group, step, 0);
        if (rank == victim && step == last_step && group == 1) ::raise(SIGKILL);
      }
      FSDP(fsdp_finish_grads(own.model().model, 1, 0, nullptr));
      update(own.model());
    }
  } catch (const std::exception &failure) {
    fsdp_destroy_context(context);
    const std::string text = failure.what();
    return text.find("rank " + std::to_string(victim)) == std::string::npos ? 1 : 0;
  }
}

TEST(MixtureDeath, DeadRankIsNamedOnBothMeshes) {
  for (const uint32_t victim : {0u, 3u}) {
    const Mixture mixture = experts_of();
    const std::string rendezvous = "mixture-" + std::to_string(::getpid()) + "-" + std::to_string(victim);
    std::vector<pid_t> children;
    for (uint32_t r = 0; r < ranks; ++r)
      if (children.push_back(::fork()), children.back() == 0)
        ::_exit(train_until_death(mixture, r, victim, rendezvous));
    const double began = now();
    for (uint32_t r = 0; r < ranks; ++r) {
      int status = 0;
      ASSERT_EQ(::waitpid(children[r], &status, 0), children[r]);
      if (r == victim)
        EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      else
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r;
    }
    EXPECT_LT(now() - began, 10);
  }
}

}  // namespace
