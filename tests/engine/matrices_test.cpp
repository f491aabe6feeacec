// SPDX-License-Identifier: Apache-2.0
// Matrices come whole to one rank each and go back, with the same bits for every number of ranks, mesh and strategy.
#include "matrices.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <optional>
#include <set>

#include "element.h"
#include "expert_layers.h"

namespace harness::matrices {
namespace {

std::vector<Shape> all_shapes() {
  std::vector<Shape> shapes;
  for (const fsdp_strategy strategy : strategies)
    for (const uint64_t bytes : {0, 1024}) {  // at most two of the larger matrices
      for (const uint32_t ranks : {1u, 2u, 3u, 4u}) shapes.push_back({ranks, strategy, Axis::one, 1, bytes});
      for (const Axis axis : {Axis::hsdp, Axis::hfsdp, Axis::hosts})
        for (const uint32_t inner : {1u, 2u}) shapes.push_back({2 * inner, strategy, axis, inner, bytes});
    }
  return shapes;
}

std::vector<std::vector<float>> change_grads(const Scenario &setup, uint32_t microbatches = 1) {
  Whole whole(setup.groups);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (int step = 0; step < 2; ++step) {
      give_whole_grads(rank, microbatches);
      collect(rank);
      change_matrices(rank);
      FSDP(fsdp_return_matrices(rank.model, stream()));
      if (step == 1) add_shards(rank, whole, nullptr);
      publish(rank);
    }
    FSDP(fsdp_close_context(context));
  });
  return whole.values();
}

TEST(Matrices, HaveTheBitsOfOneProcessOnEveryMesh) {
  Sample sample(5);
  for (const Shape &shape : all_shapes()) {
    if (!sample.takes_next()) continue;
    SCOPED_TRACE(shape.text());
    const Scenario setup = scenario_of(shape);
    EXPECT_TRUE(same_bits(change_grads(setup), change_alone(setup.groups, whole_grads(setup))));
  }
}

TEST(Matrices, DoNotDependOnMicroBatches) {
  const Scenario setup = scenario_of({.ranks = 3, .matrix_bytes = 1024});
  EXPECT_TRUE(same_bits(change_grads(setup, 4), change_grads(setup, 1)));
}

// The checksum is that of a program in numpy.
TEST(Matrices, ReversedRowsHaveTheChecksumOfTheContract) {
  ParamDef param{"w", {10, 4}};
  param.matrix = FSDP_MATRIX_LAST_TWO;
  const Shape shapes[] = {
      {1}, {2}, {3}, {4}, {4, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::hfsdp, 2}, {2, FSDP_STRATEGY_OPTIM}};
  for (const Shape &shape : shapes) {
    const Scenario setup = scenario_of(shape, {{"group", {param}}});
    EXPECT_EQ(expert_layers::crc_of(change_grads(setup).at(0)), 0xEEFF5521u) << shape.text();
  }
}

TEST(Matrices, GoFromAnyPlaneToAnyOther) {
  for (const Shape &shape :
       {Shape{3}, Shape{4, FSDP_STRATEGY_OPTIM_GRADS, Axis::hfsdp, 2, 1024}, Shape{2, FSDP_STRATEGY_NO_SHARD}}) {
    SCOPED_TRACE(shape.text());
    Scenario setup = scenario_of(shape);
    setup.model.optimizer = FSDP_OPTIMIZER_CALLER;
    Whole momentum(setup.groups), weights(setup.groups), before(setup.groups);
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup, false);
      FSDP(fsdp_add_optimizer_state(rank.model, "momentum", FSDP_BFLOAT16));
      FSDP(fsdp_seal_model(rank.model));
      rank.load();
      give_whole_grads(rank);
      add_shards(rank, before, "main_weight");
      collect(rank, nullptr, "momentum");
      change_matrices(rank);
      FSDP(fsdp_return_matrices(rank.model, stream()));
      add_shards(rank, momentum, "momentum");
      collect(rank, "momentum", "main_weight");
      change_matrices(rank);
      FSDP(fsdp_return_matrices(rank.model, stream()));
      add_shards(rank, weights, "main_weight");
      publish(rank);
      FSDP(fsdp_close_context(context));
    });
    auto first = change_alone(setup.groups, whole_grads(setup));
    const auto second = change_alone(setup.groups, first);
    uint32_t ordinal = 0;
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params) {
        if (!param.matrix) first[ordinal].assign(first[ordinal].size(), 0);
        EXPECT_EQ(momentum.values()[ordinal], first[ordinal]) << param.name;
        EXPECT_EQ(weights.values()[ordinal], param.matrix ? second[ordinal] : before.values()[ordinal]) << param.name;
        ++ordinal;
      }
  }
}

TEST(Matrices, AreRoundedToTheirDtypeOnTheWayThereAndBack) {
  const Scenario setup = scenario_of({3, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::one, 1, 1024});
  Whole whole(setup.groups);
  std::atomic<uint64_t> bytes{0};
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    give_whole_grads(rank);
    FSDP(fsdp_scale_grads(rank.model, 1.001, stream()));  // no number of bf16
    collect(rank, nullptr, nullptr, FSDP_BFLOAT16);
    change_matrices(rank, [&](const fsdp_matrix &given) {
      REQUIRE(given.dtype == FSDP_BFLOAT16);
      bytes += given.count * given.rows * given.columns * 2;
    });
    FSDP(fsdp_return_matrices(rank.model, stream()));
    add_shards(rank, whole, nullptr);
    publish(rank);
    FSDP(fsdp_close_context(context));
  });
  auto values = whole_grads(setup);
  for (auto &all : values)
    for (float &value : all) value = round_to(value * 1.001F, FSDP_BFLOAT16);
  auto expected = change_alone(setup.groups, values);
  uint32_t ordinal = 0;
  uint64_t elements = 0;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) {
      for (uint64_t i = 0; i < expected[ordinal].size(); ++i)
        expected[ordinal][i] =
            param.matrix ? round_to(expected[ordinal][i], FSDP_BFLOAT16) : whole_grad(ordinal, i) * 1.001F;
      elements += param.matrix ? param.count() : 0;
      EXPECT_EQ(whole.values()[ordinal], expected[ordinal]) << param.name;
      ++ordinal;
    }
  EXPECT_EQ(bytes, elements * 2);
}

// -- owners --

struct Given {
  std::mutex mutex;
  std::map<std::string, int> times;  // by parameter, split and batch
  void add(const fsdp_matrix &given) {
    const std::lock_guard lock(mutex);
    for (uint64_t m = 0; m < given.count; ++m)
      ++times[std::string(given.name) + "." + std::to_string(given.split_index) + "." +
              std::to_string(given.batch_index + m)];
  }
};

TEST(Matrices, ComeToOneRankOfEachReplica) {
  const Shape shapes[] = {{3},
                          {4, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::hsdp, 2},
                          {4, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::hfsdp, 2},
                          {2, FSDP_STRATEGY_NO_SHARD}};
  const int times[] = {1, 2, 1, 2};
  for (size_t s = 0; s < std::size(shapes); ++s) {
    const Scenario setup = scenario_of(shapes[s]);
    Given all;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      give_whole_grads(rank);
      collect(rank);
      change_matrices(rank, [&](const fsdp_matrix &given) { all.add(given); });
      FSDP(fsdp_return_matrices(rank.model, stream()));
      publish(rank);
      FSDP(fsdp_close_context(context));
    });
    EXPECT_EQ(all.times.size(), 1u + 1 + 3 + 6 + 2 * 2 * 3) << shapes[s].text();
    for (const auto &[name, count] : all.times) EXPECT_EQ(count, times[s]) << name << ": " << shapes[s].text();
  }
}

TEST(Matrices, OfAStackComeTogether) {
  const Scenario setup = scenario_of({.ranks = 2});
  std::atomic<uint64_t> stacked{0};
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    give_whole_grads(rank);
    collect(rank);
    int calls = 0;
    change_matrices(rank, [&](const fsdp_matrix &given) {
      if (std::string(given.name) != "stack") return;
      REQUIRE(++calls == 1 && given.rows == 5 && given.columns == 4 && given.row_offset == 0);
      REQUIRE(given.group == rank.groups[2] && given.param_index == 0);
      REQUIRE(given.stride_bytes >= given.rows * given.columns * 4);
      stacked += given.count;
    });
    FSDP(fsdp_return_matrices(rank.model, stream()));
    publish(rank);
    FSDP(fsdp_close_context(context));
  });
  EXPECT_EQ(stacked, 6u);
}

TEST(Matrices, LeaveSomeRanksWithoutOneIfThereAreMoreRanks) {
  ParamDef param{"w", {7, 3}};
  param.matrix = FSDP_MATRIX_LAST_TWO;
  const Scenario setup = scenario_of({.ranks = 4}, {{"group", {param}}});
  EXPECT_TRUE(same_bits(change_grads(setup), change_alone(setup.groups, whole_grads(setup))));
}

TEST(Matrices, OfParametersThatAStepLeavesUnchangedDoNotTravel) {
  Scenario setup = scenario_of({3, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::one, 1, 1024});
  Given all;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_set_param_trainable(rank.groups[1], 0, 0));
    for (size_t g = rank.groups.size(); g-- > 0;) {
      for (size_t p = 0; p < rank.def(g).params.size(); ++p)
        if (g != 1 || p != 0) {
          const std::vector<float> ones(rank.def(g).params[p].count(), 1);
          const Placed placed(ones);
          FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, ones.size(), 0, stream()));
        }
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
    }
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    collect(rank);
    change_matrices(rank, [&](const fsdp_matrix &given) { all.add(given); });
    FSDP(fsdp_return_matrices(rank.model, stream()));
    publish(rank);
    FSDP(fsdp_close_context(context));
  });
  for (const auto &[name, count] : all.times) EXPECT_EQ(name.find("qkv"), std::string::npos) << name;
  EXPECT_EQ(all.times.size(), 1u + 1 + 6 + 2 * 2 * 3);
}

TEST(Matrices, TakeTheMemoryOfThePlan) {
  for (const Shape &shape : all_shapes()) {
    if (shape.ranks > 2 && shape.axis == Axis::one) continue;
    const Scenario setup = scenario_of(shape);
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      const Memory planned = memory_of(rank.model, r);
      const Stats stats = rank.stats();
      for (int role = 0; role <= last_role; ++role) REQUIRE(planned.role_bytes[role] == stats.allocated_bytes[role]);
      REQUIRE(planned.role_bytes[FSDP_ROLE_MATRIX] > 0);
      FSDP(fsdp_close_context(context));
    });
  }
}

// The library's threads are late at random: no order of the work of two streams is left to chance.
TEST(Matrices, HaveTheSameBitsWithDelays) {
  for (const Shape &shape : {Shape{3, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::one, 1, 512},
                             Shape{4, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::hfsdp, 2, 512},
                             Shape{6, FSDP_STRATEGY_OPTIM_GRADS, Axis::hosts, 3, 512}})
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      Scenario setup = scenario_of(shape);
      setup.context.debug_delay_us = 300;
      setup.context.debug_delay_seed = seed;
      EXPECT_TRUE(same_bits(change_grads(setup), change_alone(setup.groups, whole_grads(setup)))) << shape.text();
    }
}

// A rank is slow between any two of its matrices: others wait for it, and nothing is overwritten.
TEST(Matrices, WaitForASlowRank) {
  for (const Shape &shape : {Shape{3, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::one, 1, 512},
                             Shape{4, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::hfsdp, 2, 512}})
    for (uint32_t slow = 0; slow < shape.ranks; ++slow) {
      const Scenario setup = scenario_of(shape);
      Whole whole(setup.groups);
      run_threads(setup, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        give_whole_grads(rank);
        collect(rank);
        change_matrices(rank, [&](const fsdp_matrix &) {
          if (r == slow) pause_ms(3);
        });
        FSDP(fsdp_return_matrices(rank.model, stream()));
        add_shards(rank, whole, nullptr);
        publish(rank);
        FSDP(fsdp_close_context(context));
      });
      EXPECT_TRUE(same_bits(whole.values(), change_alone(setup.groups, whole_grads(setup)))) << "rank " << slow;
    }
}

// A matrix without splits has one split of all its rows.
TEST(Matrices, AreDescribedAsDeclared) {
  const Scenario setup = scenario_of({.ranks = 1});
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    const auto splits_of = [&](size_t group, uint64_t param) {
      fsdp_param info = FSDP_PARAM_INIT;
      FSDP(fsdp_get_param_info(rank.groups[group], param, &info));
      REQUIRE(info.matrix == (info.matrix_splits ? FSDP_MATRIX_LAST_TWO : 0));
      return std::vector<uint64_t>(info.matrix_splits, info.matrix_splits + info.matrix_split_count);
    };
    REQUIRE(splits_of(0, 0) == std::vector<uint64_t>{10});
    REQUIRE(splits_of(0, 1).empty());
    REQUIRE((splits_of(1, 0) == std::vector<uint64_t>{16, 4, 4}));
    FSDP(fsdp_close_context(context));
  });
}

// -- meshes of groups --

// Experts of a rank are those of its mesh, and have the gradients of its ranks alone.
TEST(Matrices, OfExpertsComeToRanksOfTheirMesh) {
  Scenario setup = scenario_of({4, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::one, 1, 1024});
  setup.groups[2].meshes = 2;
  std::array<Whole, 2> of_mesh{Whole(setup.groups), Whole(setup.groups)};
  std::array<std::atomic<uint64_t>, 4> owned{};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    give_whole_grads(rank);
    collect(rank);
    change_matrices(rank, [&](const fsdp_matrix &given) { owned[r] += given.count; });
    FSDP(fsdp_return_matrices(rank.model, stream()));
    add_shards(rank, of_mesh[r % 2], nullptr);
    publish(rank);
    FSDP(fsdp_close_context(context));
  });
  for (const auto &count : owned) EXPECT_GT(count, 0u);
  const float share[] = {-5 + 2, 1 + 3};  // of ranks 0 and 2, and of ranks 1 and 3
  for (uint32_t mesh = 0; mesh < 2; ++mesh) {
    auto grads = whole_grads(setup);
    for (uint32_t p = 0; p < 2; ++p)
      for (float &value : grads[setup.ordinal(2, p)]) value *= share[mesh];
    const auto expected = change_alone(setup.groups, grads);
    for (uint32_t ordinal = setup.ordinal(2, 0); ordinal < expected.size(); ++ordinal)
      EXPECT_EQ(of_mesh[mesh].values()[ordinal], expected[ordinal]) << "mesh " << mesh << ", parameter " << ordinal;
  }
}

}  // namespace
}  // namespace harness::matrices
