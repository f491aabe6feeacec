// SPDX-License-Identifier: Apache-2.0
// Ways to hold groups that are not the plain loop: tied parameters, several holds, resident groups, interleaved and
// explicit schedules, and deviations from them.
#include <gtest/gtest.h>

#include "harness.h"

using namespace harness;

namespace {

TEST(Holds, ATiedEmbeddingIsVisitedFirstAndLast) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 3, mode);
    scenario.schedule = FSDP_SCHEDULE_VISITS;
    for (const uint32_t g : {0u, 1u, 2u, 3u, 0u}) scenario.visits.push_back({g, FSDP_FORWARD});
    for (const uint32_t g : {0u, 3u, 2u, 1u, 0u}) scenario.visits.push_back({g, FSDP_BACKWARD});
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      for (int s = 0; s < 3; ++s) {
        for (const fsdp_visit &visit : scenario.visits) {
          fsdp_group *group = rank.groups[visit.group_index];
          FSDP(fsdp_unshard(group, visit.phase, nullptr));
          REQUIRE(rank.view(visit.group_index, 0, visit.phase) == rank.view(visit.group_index, 0, visit.phase));
          if (visit.phase == FSDP_BACKWARD) put_all(rank, visit.group_index, 1.0f);
          FSDP(fsdp_reshard(group, visit.phase, nullptr));
          // The embedding is reduced once, when its second backward visit has added its part.
          const bool first_visit_back = &visit == &scenario.visits[5];
          if (visit.phase == FSDP_BACKWARD && !first_visit_back) FSDP(fsdp_reduce_grad(group, FSDP_LAST, nullptr));
        }
        FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
        for (const fsdp_shard &shard : rank.shards())
          REQUIRE(shard.main_grad[0] == (shard.group == rank.groups[0] ? 2.0f : 1.0f));
        update(rank);
      }
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Holds, TwoMicrobatchesHoldOneGroup) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 2, mode);
    scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, nullptr));
      const uint64_t before = rank.stats().gathers;
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, nullptr));
      FSDP(fsdp_unshard(rank.groups[1], FSDP_BACKWARD, nullptr));
      REQUIRE(rank.stats().gathers == before);
      const auto weights = rank.view(1, 0, FSDP_FORWARD);
      FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, nullptr));
      FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, nullptr));
      REQUIRE(rank.view(1, 0, FSDP_BACKWARD) == weights);
      FSDP(fsdp_reshard(rank.groups[1], FSDP_BACKWARD, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Holds, ADeviationFromTheScheduleNamesBothGroups) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.model.unshard_mode = FSDP_UNSHARD_COPIED;
  scenario.groups = equal_groups(6, 32, 16);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, nullptr));
    FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, nullptr));
    require_error(fsdp_unshard(rank.groups[2], FSDP_FORWARD, nullptr), FSDP_INVALID_STATE, {"'layer.2'"});
    REQUIRE(last_message().find("'layer.0'") != std::string::npos);
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, nullptr));
    FSDP(fsdp_unshard(rank.groups[2], FSDP_FORWARD, nullptr));
    FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, nullptr));
    FSDP(fsdp_reshard(rank.groups[2], FSDP_FORWARD, nullptr));
    // Visits in an order of their own still show the right weights; prefetches that nobody used are dropped.
    for (const size_t g : {0u, 3u, 5u, 4u, 1u, 2u}) {
      FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, nullptr));
      const auto view = rank.view(g, 0, FSDP_FORWARD);
      for (uint64_t i = 0; i < view.size(); ++i) REQUIRE(view[i] == initial_weight(static_cast<uint32_t>(g), i));
      FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, nullptr));
    }
    REQUIRE(rank.stats().dropped_prefetches > 0);
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

TEST(Holds, AResidentGroupIsGatheredOnceAStep) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario;
    scenario.ranks = 2;
    scenario.steps = 2;
    scenario.model.unshard_mode = mode;
    scenario.groups = equal_groups(6, 32, 16);
    scenario.groups[0].options.flags = FSDP_GROUP_RESIDENT;
    const auto outcomes = train_threads(scenario);
    EXPECT_EQ(outcomes[0].stats.gathers, 2u * (2 * 6 - 2));
    EXPECT_LE(relative_l2(outcomes[1].weights[0], reference(scenario).weights[0]), 1e-5);
  }
}

TEST(Holds, InterleavedForwardAndBackwardHoldTheSameGroups) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 2, mode);
    scenario.microbatches = 4;
    scenario.steps = 2;
    const auto expected = train_threads(scenario);
    scenario.schedule = FSDP_SCHEDULE_INTERLEAVED;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      const size_t n = rank.groups.size();
      for (uint32_t s = 0; s < scenario.steps; ++s) {
        forward(rank, nullptr);
        for (uint32_t m = 0; m < scenario.microbatches; ++m)
          for (size_t i = 0; i < n; ++i) {
            // Forward of the next micro-batch at group i while backward of this one is at group n - 1 - i.
            const bool more = m + 1 < scenario.microbatches;
            if (more) FSDP(fsdp_unshard(rank.groups[i], FSDP_FORWARD, nullptr));
            backward_group(rank, n - 1 - i, s, m, nullptr);
            if (more) {
              rank.view(i, 0, FSDP_FORWARD);
              FSDP(fsdp_reshard(rank.groups[i], FSDP_FORWARD, nullptr));
            }
          }
        FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
        update(rank);
      }
      REQUIRE(rank.read_all() == expected[0].weights);
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
