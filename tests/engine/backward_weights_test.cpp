// SPDX-License-Identifier: Apache-2.0
// Groups whose BACKWARD reads no weights (FSDP_BACKWARD_WEIGHTS_NONE).
#include <gtest/gtest.h>

#include "pieces.h"

using namespace harness;

namespace {

TEST(BackwardWeights, NoneGathersNothingInBackward) {
  for (const bool none : {false, true}) {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    scenario.groups = equal_groups(3, 64, 32);
    scenario.prefetch_small_groups();
    if (none) scenario.groups[0].options.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE;
    each_rank(scenario, [&](Rank &rank) {
      forward(rank, nullptr);
      for (size_t g = 3; g-- > 0;) {
        const bool reads = g > 0 || !none;
        if (reads) FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, 0, nullptr));
        put_all(rank, g, 1.0f);
        if (reads) FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, 0, nullptr));
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      REQUIRE(rank.stats().all_gathers == (none ? 4 : 5) && rank.stats().dropped_prefetches == 0);
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      update(rank);
    });
  }
}

// The last group's next visit is BACKWARD. Either it keeps its weights for that visit, or, if BACKWARD reads none, the
// other group is gathered ahead and the last one keeps nothing.
TEST(BackwardWeights, NoneKeepsNothingForTheBackwardVisitThatFollows) {
  for (const bool none : {false, true}) {
    Scenario scenario = four_scenario(FSDP_UNSHARD_COPIED, 2);
    scenario.model.flags = 0;
    scenario.prefetch_small_groups();
    if (none) scenario.groups[1].options.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE;
    each_rank(scenario, [&](Rank &rank) {
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
      REQUIRE(rank.stats().gathered_groups == 1 && rank.stats().prefetches == (none ? 3u : 0u));
    });
  }
}

TEST(BackwardWeights, NoneRefusesBackwardHoldsForEveryStrategy) {
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {1u, 2u}) {
      Scenario scenario = scenario_of(strategy, ranks);
      scenario.groups[0].options.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE;
      each_rank(scenario, [](Rank &rank) {
        const std::vector<std::string> words = {"'embed'", "FSDP_BACKWARD_WEIGHTS_NONE"};
        require_error(fsdp_unshard(rank.groups[0], FSDP_BACKWARD, 0, nullptr), FSDP_INVALID_STATE, words);
        require_error(fsdp_unshard_piece(rank.groups[0], 0, FSDP_BACKWARD, 0, nullptr), FSDP_INVALID_STATE, words);
        require_error(fsdp_prefetch(rank.groups[0], FSDP_BACKWARD, 0, nullptr), FSDP_INVALID_STATE,
                      {"fsdp_prefetch: group 'embed'", "FSDP_BACKWARD_WEIGHTS_NONE"});
        fsdp_tensor tensor = FSDP_TENSOR_INIT;
        require_error(fsdp_get_param(rank.groups[0], 0, FSDP_BACKWARD, &tensor), FSDP_INVALID_STATE, words);
        FSDP(fsdp_unshard(rank.groups[0], FSDP_RECOMPUTE, 0, nullptr));
        FSDP(fsdp_get_param(rank.groups[0], 0, FSDP_RECOMPUTE, &tensor));
        FSDP(fsdp_reshard(rank.groups[0], FSDP_RECOMPUTE, 0, nullptr));
      });
    }
}

TEST(BackwardWeights, NoneTrainsTheSameBits) {
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
      for (const auto kind : {FSDP_SCHEDULE_SEQUENTIAL, FSDP_SCHEDULE_INTERLEAVED}) {
        Scenario scenario = scenario_of(strategy, 3, mode);
        scenario.microbatches = 2;
        scenario.schedule = kind;
        scenario.prefetch_small_groups();
        for (const size_t g : {0, 2}) scenario.groups[g].options.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE;
        const std::vector<Outcome> outcomes = train_threads(scenario);
        EXPECT_EQ(difference(scenario, outcomes), "") << strategy << ", " << mode << ", " << kind;
        EXPECT_EQ(outcomes[0].stats.allocated_bytes, outcomes[0].memory.role_bytes);
      }
}

TEST(BackwardWeights, NoneNeedsNoBufferForTheBackwardPass) {
  const auto gather_bytes = [](uint32_t none) {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    scenario.groups = equal_groups(3, 64, 32);
    scenario.schedule = FSDP_SCHEDULE_INTERLEAVED;
    for (uint32_t g = 0; g < none; ++g) scenario.groups[g].options.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE;
    scenario.steps = 0;
    return train_threads(scenario)[0].memory.role_bytes[FSDP_ROLE_GATHER];
  };
  // Two buffers for each direction, then one for the only group that BACKWARD reads, then none.
  EXPECT_EQ(gather_bytes(0), 4 * matrix_bytes);
  EXPECT_EQ(gather_bytes(2), 3 * matrix_bytes);
  EXPECT_EQ(gather_bytes(3), 2 * matrix_bytes);
}

TEST(BackwardWeights, OfAnUnknownKindIsRefusedAndAnotherOneOnARankIsAMismatch) {
  Scenario scenario = four_scenario(), odd = scenario;
  odd.groups[0].options.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE;
  std::vector<std::string> errors;
  run_threads(
      scenario, [&](uint32_t r, fsdp_context *context) { Rank(context, r ? odd : scenario); }, &errors);
  for (const std::string &error : errors)
    EXPECT_NE(error.find("FSDP_BACKWARD_WEIGHTS_NONE"), std::string::npos) << error;
  scenario.groups[0].options.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE;
  scenario.groups[0].options.flags = FSDP_GROUP_RESIDENT;
  run_threads(
      scenario, [&](uint32_t, fsdp_context *context) { Rank(context, scenario, false); }, &errors);
  EXPECT_NE(errors[0].find("leave out one of the two"), std::string::npos) << errors[0];
  scenario.groups[0].options.flags = 0;
  scenario.groups[0].options.backward_weights = 3;
  run_threads(
      scenario, [&](uint32_t, fsdp_context *context) { Rank(context, scenario, false); }, &errors);
  EXPECT_NE(errors[0].find("backward_weights"), std::string::npos) << errors[0];
}

}  // namespace
