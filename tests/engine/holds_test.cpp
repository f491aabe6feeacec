// SPDX-License-Identifier: Apache-2.0
// Ways to hold groups other than the plain loop: tied parameters, several holds, resident groups, interleaved and
// explicit schedules, and deviations from them.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <thread>

#include "../library_threads.h"
#include "harness.h"

using namespace harness;

namespace {

// Compares every parameter of a held group with the main weights, which were published as they are.
void expect_published(const Rank &rank, size_t g, fsdp_phase phase, const std::vector<std::vector<float>> &weights) {
  for (size_t p = 0; p < rank.def(g).params.size(); ++p)
    REQUIRE(rank.view(g, p, phase) == weights[rank.setup.ordinal(g, p)]);
}

std::vector<std::vector<float>> loaded_weights(const Scenario &setup) {
  Scenario loaded = setup;
  loaded.steps = 0;
  return reference(loaded).weights;
}

TEST(Holds, ATiedEmbeddingIsVisitedFirstAndLast) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, mode);
    scenario.schedule = FSDP_SCHEDULE_VISITS;
    for (const uint32_t g : {0u, 1u, 2u, 3u, 0u}) scenario.visits.push_back({g, FSDP_FORWARD, 0});
    for (const uint32_t g : {0u, 3u, 2u, 1u, 0u}) scenario.visits.push_back({g, FSDP_BACKWARD, 0});
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      REQUIRE(rank.read_all() == loaded_weights(scenario));
      for (int s = 0; s < 3; ++s) {
        const auto weights = rank.read_all();
        for (const fsdp_visit &visit : scenario.visits) {
          fsdp_group *group = rank.groups[visit.group_index];
          FSDP(fsdp_unshard(group, visit.phase, 0, nullptr));
          expect_published(rank, visit.group_index, visit.phase, weights);
          if (visit.phase == FSDP_BACKWARD) put_all(rank, visit.group_index, 1.0f);
          FSDP(fsdp_reshard(group, visit.phase, 0, nullptr));
          // The embedding is reduced once, when its second backward visit has added its part.
          const bool first_visit_back = &visit == &scenario.visits[5];
          if (visit.phase == FSDP_BACKWARD && !first_visit_back) FSDP(fsdp_reduce_grad(group, FSDP_LAST, nullptr));
        }
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        for (const fsdp_shard &shard : rank.shards())
          for (uint64_t i = 0; i < shard.element_count; ++i)
            REQUIRE(main_grad(shard)[i] == (shard.group == rank.groups[0] ? 2.0f : 1.0f));
        update(rank);
        REQUIRE(rank.read_all() != weights);
      }
      FSDP(fsdp_close_context(context));
    });
  }
}

// For a short copy the caller would wait for two wake-ups, which take longer than the copy. A long copy runs while the
// caller goes on.
TEST(Holds, AShortCopyWakesNoThread) {
  for (const bool is_short : {true, false}) {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
    scenario.groups = equal_groups(2, is_short ? 64 : 1100, 1000);
    std::barrier together(2);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      const auto await_sleep = [] {  // threads of the library spin first
        while (!fsdp::test::all_sleep("fsdp-gather")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
      const auto visit = [&](size_t g) {
        FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
        FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
        await_sleep();
      };
      for (const size_t g : {0, 1}) visit(g);
      together.arrive_and_wait();
      await_sleep();
      const uint64_t before = fsdp::test::sleeps_of("fsdp-gather");
      const uint64_t waited = rank.stats().gather_wait_ns;
      together.arrive_and_wait();
      if (r == 0)
        for (int i = 0; i < 10; ++i) visit(static_cast<size_t>(i % 2));
      const uint64_t sleeps = fsdp::test::sleeps_of("fsdp-gather") - before;
      if (r == 0 && is_short) REQUIRE(sleeps == 0);
      if (r == 0 && !is_short) REQUIRE(sleeps > 0);
      if (r == 0) REQUIRE(rank.stats().gather_wait_ns > waited);  // exposed, whichever thread copies
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Holds, TwoMicrobatchesHoldOneGroup) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, mode);
    scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
      const uint64_t before = rank.stats().gathers;
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_unshard(rank.groups[1], FSDP_BACKWARD, 0, nullptr));
      REQUIRE(rank.stats().gathers == before);
      const auto weights = loaded_weights(scenario);
      expect_published(rank, 1, FSDP_FORWARD, weights);
      for (int hold = 0; hold < 2; ++hold) {
        FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
        expect_published(rank, 1, FSDP_BACKWARD, weights);
      }
      FSDP(fsdp_reshard(rank.groups[1], FSDP_BACKWARD, 0, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

// Whichever of the two holds is returned first, the other one keeps the weights, and nothing is gathered for it.
TEST(Holds, ARecomputeHoldKeepsTheGroupAsABackwardOneDoes) {
  for (const auto kind : {FSDP_SCHEDULE_SEQUENTIAL, FSDP_SCHEDULE_INTERLEAVED})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
      for (const fsdp_phase first : {FSDP_BACKWARD, FSDP_RECOMPUTE}) {
        Scenario scenario;
        scenario.ranks = 2;
        scenario.schedule = kind;
        scenario.model.unshard_mode = mode;
        scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
        scenario.groups = equal_groups(3, 32, 16);
        run_threads(scenario, [&](uint32_t, fsdp_context *context) {
          Rank rank(context, scenario);
          rank.load();
          const fsdp_phase other = first == FSDP_BACKWARD ? FSDP_RECOMPUTE : FSDP_BACKWARD;
          FSDP(fsdp_unshard(rank.groups[2], FSDP_BACKWARD, 0, nullptr));
          REQUIRE(rank.stats().gathers == 1);
          FSDP(fsdp_unshard(rank.groups[2], FSDP_RECOMPUTE, 0, nullptr));
          REQUIRE(rank.stats().gathers == 1);
          FSDP(fsdp_reshard(rank.groups[2], first, 0, nullptr));
          REQUIRE(rank.stats().gathered_groups == 1);
          const auto expect_own_weights = [&] {
            const auto seen = rank.view(2, 0, other);
            for (uint64_t i = 0; i < seen.size(); ++i) REQUIRE(seen[i] == initial_weight(2, i));
          };
          expect_own_weights();
          // There is room for one copied group in this direction, and it is in use.
          if (mode == FSDP_UNSHARD_COPIED) {
            FSDP(fsdp_prefetch(rank.groups[1], FSDP_BACKWARD, 0, nullptr));
            require_error(fsdp_unshard(rank.groups[1], FSDP_BACKWARD, 0, nullptr), FSDP_INVALID_STATE,
                          {"'layer.1'", "'layer.2'"});
          }
          expect_own_weights();
          FSDP(fsdp_reshard(rank.groups[2], other, 0, nullptr));
          FSDP(fsdp_unshard(rank.groups[1], FSDP_BACKWARD, 0, nullptr));
          FSDP(fsdp_reshard(rank.groups[1], FSDP_BACKWARD, 0, nullptr));
          FSDP(fsdp_discard_step(rank.model, nullptr));
          FSDP(fsdp_close_context(context));
        });
      }
}

// In a backward pass the group before is gathered ahead, also if the recompute comes first. The recompute's hold is
// returned before or after the backward hold is taken. Each group is gathered once in each direction, and no gather is
// unused.
void expect_backward_order(fsdp_unshard_mode mode, bool returned_before) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.model.unshard_mode = mode;
  scenario.groups = equal_groups(5, 32, 16);
  scenario.prefetch_small_groups();
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    for (int round = 0; round < 2; ++round) {
      forward(rank, nullptr);
      for (size_t g = 5; g-- > 0;) {
        FSDP(fsdp_unshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
        if (returned_before) FSDP(fsdp_reshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
        FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, 0, nullptr));
        if (!returned_before) FSDP(fsdp_reshard(rank.groups[g], FSDP_RECOMPUTE, 0, nullptr));
        const fsdp_stats stats = rank.stats();
        // The first one of the pass was gathered for its forward visit, and the next one is on its way now.
        const uint64_t backward = std::min<uint64_t>(5 - g, 4);
        REQUIRE(stats.gathers == static_cast<uint64_t>(round) * 9 + 5 + backward);
        REQUIRE(stats.gathered_groups == (g ? 2u : 1u));
        FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, 0, nullptr));
      }
      REQUIRE(rank.stats().dropped_prefetches == 0);
    }
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

TEST(Holds, ARecomputeGathersAheadAsTheBackwardPassDoes) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (const bool returned_before : {false, true}) expect_backward_order(mode, returned_before);
}

TEST(Holds, ADeviationFromTheScheduleNamesBothGroups) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.model.unshard_mode = FSDP_UNSHARD_COPIED;
  scenario.groups = equal_groups(6, 32, 16);
  scenario.prefetch_small_groups();
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
    require_error(fsdp_unshard(rank.groups[2], FSDP_FORWARD, 0, nullptr), FSDP_INVALID_STATE,
                  {"'layer.2'", "or create group 'layer.0' with FSDP_GROUP_RESIDENT"});
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    FSDP(fsdp_unshard(rank.groups[2], FSDP_FORWARD, 0, nullptr));
    FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
    FSDP(fsdp_reshard(rank.groups[2], FSDP_FORWARD, 0, nullptr));
    // Visits in an order of their own still show the right weights; prefetches that were not used are dropped.
    for (const size_t g : {0u, 3u, 5u, 4u, 1u, 2u}) {
      FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
      const auto view = rank.view(g, 0, FSDP_FORWARD);
      for (uint64_t i = 0; i < view.size(); ++i) REQUIRE(view[i] == initial_weight(static_cast<uint32_t>(g), i));
      FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
    }
    REQUIRE(rank.stats().dropped_prefetches > 0);
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

// The error of the test above advises to do this.
TEST(Holds, AResidentGroupMayBeHeldAllTheWay) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.model.unshard_mode = FSDP_UNSHARD_COPIED;
  scenario.groups = equal_groups(6, 32, 16);
  scenario.groups[0].options.flags = FSDP_GROUP_RESIDENT;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    for (size_t g = 1; g < 6; ++g) {
      FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
    }
    const auto view = rank.view(0, 0, FSDP_FORWARD);
    for (uint64_t i = 0; i < view.size(); ++i) REQUIRE(view[i] == initial_weight(0, i));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    // A group that is resident already, or held in backward, gets no such advice.
    FSDP(fsdp_unshard(rank.groups[5], FSDP_BACKWARD, 0, nullptr));
    FSDP(fsdp_unshard(rank.groups[4], FSDP_BACKWARD, 0, nullptr));
    require_error(fsdp_unshard(rank.groups[3], FSDP_BACKWARD, 0, nullptr), FSDP_INVALID_STATE, {"'layer.3'"});
    REQUIRE(last_message().find("RESIDENT") == std::string::npos);
    FSDP(fsdp_reshard(rank.groups[5], FSDP_BACKWARD, 0, nullptr));
    FSDP(fsdp_reshard(rank.groups[4], FSDP_BACKWARD, 0, nullptr));
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

// Each of n groups is gathered once for all k micro-batches. Otherwise each micro-batch gathers n groups forward and n
// - 1 backward.
TEST(Holds, ResidentGroupsHeldOverMicrobatchesAreGatheredOnceAStep) {
  constexpr uint32_t groups = 4, microbatches = 3;
  Scenario scenario;
  scenario.ranks = 2;
  scenario.steps = 1;
  scenario.microbatches = microbatches;
  scenario.model.unshard_mode = FSDP_UNSHARD_COPIED;
  scenario.groups = equal_groups(groups, 32, 16);
  EXPECT_EQ(train_threads(scenario)[0].stats.gathers, uint64_t{2 * groups - 1} * microbatches);

  for (GroupDef &group : scenario.groups) group.options.flags = FSDP_GROUP_RESIDENT;
  const auto expected = reference(scenario).weights;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    for (fsdp_group *group : rank.groups) FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
    for (uint32_t microbatch = 0; microbatch < microbatches; ++microbatch) backward(rank, 0, microbatch, nullptr);
    for (fsdp_group *group : rank.groups) FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, nullptr));
    REQUIRE(rank.stats().gathers == groups);
    FSDP(fsdp_finish_grads(rank.model, scenario.scale, 0, nullptr));
    update(rank);
    REQUIRE(same_bits(rank.read_all(), expected));
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
    EXPECT_EQ(difference(scenario, outcomes), "");
  }
}

TEST(Holds, InterleavedForwardAndBackwardHoldTheSameGroups) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, mode);
    scenario.microbatches = 4;
    scenario.steps = 2;
    const Outcome expected = reference(scenario);
    scenario.schedule = FSDP_SCHEDULE_INTERLEAVED;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      const size_t n = rank.groups.size();
      for (uint32_t s = 0; s < scenario.steps; ++s) {
        const auto weights = rank.read_all();
        forward(rank, nullptr);
        for (uint32_t m = 0; m < scenario.microbatches; ++m)
          for (size_t i = 0; i < n; ++i) {
            // Forward of the next micro-batch at group i while backward of this one is at group n - 1 - i.
            const bool more = m + 1 < scenario.microbatches;
            if (more) FSDP(fsdp_unshard(rank.groups[i], FSDP_FORWARD, 0, nullptr));
            backward_group(rank, n - 1 - i, s, m, nullptr);
            if (more) {
              expect_published(rank, i, FSDP_FORWARD, weights);
              FSDP(fsdp_reshard(rank.groups[i], FSDP_FORWARD, 0, nullptr));
            }
          }
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        update(rank);
      }
      REQUIRE(rank.read_all() == expected.weights);
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
