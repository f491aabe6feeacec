// SPDX-License-Identifier: Apache-2.0
// Numbers that calls take and give beside tensors: values over meshes, and which rank came last.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "harness.h"

using namespace harness;

namespace {

Scenario ranks_of(uint32_t ranks) { return scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks); }

TEST(Values, AMeanIsTheSumDividedByTheRanks) {
  run_threads(ranks_of(3), [&](uint32_t r, fsdp_context *context) {
    double values[] = {static_cast<double>(r), 1.0, r == 1 ? std::numeric_limits<double>::quiet_NaN() : 0.0};
    FSDP(fsdp_all_reduce_values(context, nullptr, values, 3, FSDP_VALUE_MEAN));
    REQUIRE(values[0] == 1.0 && values[1] == 1.0 && std::isnan(values[2]));
    FSDP(fsdp_close_context(context));
  });
}

TEST(Values, OfAMeshAreItsRanksAloneInItsOrder) {
  run_threads(ranks_of(4), [&](uint32_t r, fsdp_context *context) {
    fsdp_mesh *mesh = make_mesh(context, r % 2 ? std::vector<uint32_t>{3, 1} : std::vector<uint32_t>{0, 2});
    for (int turn = 0; turn < 3; ++turn) {
      double value = r + 1;
      FSDP(fsdp_all_reduce_values(context, mesh, &value, 1, FSDP_VALUE_SUM));
      REQUIRE(value == (r % 2 ? 6 : 4));
      double all = r + 1;
      FSDP(fsdp_all_reduce_values(context, nullptr, &all, 1, FSDP_VALUE_SUM));
      REQUIRE(all == 10);
    }
    // In the mesh's order: 1e16 + 1 loses the one, so (1e16 + 1) - 1e16 = 0, but (-1e16 + 1e16) + 1 = 1.
    double cancels = r == 3 ? 1e16 : r == 1 ? 1.0 : 0;
    FSDP(fsdp_all_reduce_values(context, mesh, &cancels, 1, FSDP_VALUE_SUM));
    REQUIRE(cancels == (r % 2 ? 1e16 + 1.0 : 0));
    fsdp_destroy_mesh(mesh);
    FSDP(fsdp_close_context(context));
  });
}

TEST(Stats, NameTheRankThatComesLast) {
  const Scenario scenario = ranks_of(3);
  std::atomic<uint32_t> come{0};
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    REQUIRE(rank.stats().last_rank == -1);
    uint32_t others = 0;
    for (const uint32_t late : {2u, 0u, 1u}) {
      for (size_t g = rank.groups.size(); g-- > 0;) {
        put_all(rank, g, 1.0f);
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      double meet = 0;
      FSDP(fsdp_all_reduce_values(context, nullptr, &meet, 1, FSDP_VALUE_SUM));
      others += 2;
      if (r != late) ++come;
      while (r == late && come < others) pause_ms(1);
      if (r == late) pause_ms(1000);
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      update(rank);
      const Stats stats = rank.stats();
      REQUIRE(stats.last_rank == static_cast<int32_t>(late));
      REQUIRE(stats.last_rank_lag_ns > 500'000'000 && stats.last_rank_lag_ns < 10'000'000'000);
    }
    FSDP(fsdp_close_context(context));
  });
}

// A root group is gathered first and last in each direction: as with the same visits by hand.
TEST(RootGroup, IsVisitedFirstAndLast) {
  Scenario root = ranks_of(2);
  root.groups[0].options.flags = FSDP_GROUP_ROOT;
  Scenario listed = ranks_of(2);
  root.prefetch_small_groups();
  listed.prefetch_small_groups();
  listed.schedule = FSDP_SCHEDULE_VISITS;
  const auto groups = static_cast<uint32_t>(listed.groups.size());
  for (uint32_t g = 0; g <= groups; ++g) listed.visits.push_back({g % groups, FSDP_FORWARD, 0});
  listed.visits.push_back({0, FSDP_BACKWARD, 0});
  for (uint32_t g = groups; g-- > 1;) listed.visits.push_back({g, FSDP_BACKWARD, 0});
  listed.visits.push_back({0, FSDP_BACKWARD, 0});
  const auto walk = [](const Scenario &scenario) {
    std::vector<uint64_t> seen;
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      const size_t count = rank.groups.size();
      for (size_t i = 0; i <= count; ++i) {
        fsdp_group *group = rank.groups[i % count];
        FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
        FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, nullptr));
      }
      for (size_t i = 0; i <= count; ++i) {
        fsdp_group *group = rank.groups[i == 0 ? 0 : count - i];
        FSDP(fsdp_unshard(group, FSDP_BACKWARD, 0, nullptr));
        FSDP(fsdp_reshard(group, FSDP_BACKWARD, 0, nullptr));
      }
      const Stats stats = rank.stats();
      const Memory memory = memory_of(rank.model, rank.rank);
      FSDP(fsdp_discard_step(rank.model, nullptr));
      if (r == 0) seen = {stats.gathers, stats.prefetches, stats.dropped_prefetches, memory.gather_pool_bytes};
      FSDP(fsdp_close_context(context));
    });
    return seen;
  };
  const auto with_flag = walk(root);
  EXPECT_EQ(with_flag, walk(listed));
  EXPECT_EQ(with_flag[2], 0u);  // each group gathered ahead was the one that came
  EXPECT_GT(with_flag[1], 0u);
}

std::string violations_of(fsdp_model *model) {
  uint64_t size = 0;
  FSDP(fsdp_check_model(model, nullptr, &size));
  std::string text(size, '\0');
  FSDP(fsdp_check_model(model, text.data(), &size));
  text.pop_back();
  return text;
}

TEST(CheckModel, TellsAllViolationsAtOnce) {
  Scenario scenario = ranks_of(1);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    fsdp_model *model = nullptr;
    FSDP(fsdp_create_model(context, nullptr, &model));
    REQUIRE(violations_of(model) == "the model has no group; call fsdp_create_group first\n");
    const uint64_t shape[] = {4, 8};
    fsdp_param param = FSDP_PARAM_INIT;
    param.shape = shape;
    param.dimension_count = 2;
    for (const char *name : {"a", "b"}) {
      fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
      options.flags = name[0] == 'a' ? FSDP_GROUP_RESIDENT : FSDP_GROUP_ROOT;
      fsdp_group *group = nullptr;
      param.name = name;
      FSDP(fsdp_create_group(model, name, &param, 1, sizeof param, &options, &group));
    }
    REQUIRE(violations_of(model).empty());
    FSDP(fsdp_set_schedule(model, FSDP_SCHEDULE_INTERLEAVED, nullptr));
    const std::string flags = violations_of(model);
    REQUIRE(flags.find("group 'a' is RESIDENT") == 0 && flags.find("\ngroup 'b' is ROOT") != std::string::npos);
    const fsdp_visit visits[] = {{5, FSDP_FORWARD, 0}, {0, FSDP_BACKWARD, 0}, {1, FSDP_EVAL, 0}};
    fsdp_schedule_options schedule = FSDP_SCHEDULE_OPTIONS_INIT;
    schedule.visits = visits;
    schedule.visit_count = 3;
    schedule.visit_stride = sizeof(fsdp_visit);
    FSDP(fsdp_set_schedule(model, FSDP_SCHEDULE_VISITS, &schedule));
    const std::string all = violations_of(model);
    for (const char *part : {"group 'b' is ROOT", "visit 0: group 5 is outside [0, 2)", "visit 1: BACKWARD of group 0",
                             "visit 2: phase 4", "group 1 is trainable, but has no BACKWARD visit"})
      REQUIRE(all.find(part) != std::string::npos);
    require_error(fsdp_seal_model(model), FSDP_INVALID_ARGUMENT, {"group 'b' is ROOT", "4 more", "fsdp_check_model"});
    fsdp_destroy_model(model);
    FSDP(fsdp_close_context(context));
  });
}

// When groups and visits are right, the plan's errors about memory are listed.
TEST(CheckModel, LooksAtArenasAndSizes) {
  alignas(4096) static std::byte small[4096];
  const Scenario scenario = ranks_of(1);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    const auto violations_with = [&](std::vector<uint64_t> shape, fsdp_role role) {
      fsdp_model *model = nullptr;
      fsdp_group *group = nullptr;
      FSDP(fsdp_create_model(context, nullptr, &model));
      fsdp_param param = FSDP_PARAM_INIT;
      param.name = "w";
      param.shape = shape.data();
      param.dimension_count = static_cast<uint32_t>(shape.size());
      fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
      if (role == FSDP_ROLE_GRAD) options.strategy = FSDP_STRATEGY_NO_SHARD;
      FSDP(fsdp_create_group(model, "all", &param, 1, sizeof param, &options, &group));
      FSDP(fsdp_set_arena(model, role, small, sizeof small));
      const std::string found = violations_of(model);
      fsdp_destroy_model(model);
      return found;
    };
    const uint64_t states = 2 * 4096 * sizeof(float);
    const std::string arena = violations_with({4096}, FSDP_ROLE_OPTIMIZER);
    REQUIRE(arena.find("the arena for role " + std::to_string(FSDP_ROLE_OPTIMIZER) + " has 4096 bytes") !=
            std::string::npos);
    REQUIRE(arena.find("the model needs " + std::to_string(states)) != std::string::npos);
    REQUIRE(violations_with({16}, FSDP_ROLE_OPTIMIZER).empty());
    REQUIRE(violations_with({16}, FSDP_ROLE_GRAD).find("FSDP_ROLE_GRAD cannot be handed in") != std::string::npos);
    const uint64_t half = uint64_t{1} << 31;
    REQUIRE(violations_with({half, half / 2}, FSDP_ROLE_OPTIMIZER).find("exceeds 64 bits") != std::string::npos);
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
