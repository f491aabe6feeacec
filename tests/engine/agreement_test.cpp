// SPDX-License-Identifier: Apache-2.0
// Ranks that decide differently at the end of a step, or load differently, get an error. Handles may be destroyed while
// another thread calls.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "harness.h"

using namespace harness;

namespace {

TEST(Agreement, OneRankDiscardsWhereTheOtherSteps) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4}) {
    const Scenario scenario = scenario_of(strategy, 2, FSDP_UNSHARD_MAPPED);
    std::vector<std::vector<float>> weights(2);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      finish_step(rank, 0);
      if (r == 0) {
        FSDP(fsdp_discard_step(rank.model, nullptr));
      } else {
        require_error(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr), FSDP_INVALID_STATE,
                      {"rank 0 called fsdp_discard_step"});
        FSDP(fsdp_discard_step(rank.model, nullptr));
      }
      REQUIRE(rank.stats().version == 1);
      finish_step(rank, 1);
      FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr));
      weights[r] = rank.read(1, 0);
      FSDP(fsdp_close_context(context));
    });
    // The discarded step leaves nothing behind.
    std::vector<float> expected;
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      finish_step(rank, 1);
      FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr));
      const auto own = rank.read(1, 0);
      if (r == 0) expected = own;
      FSDP(fsdp_close_context(context));
    });
    for (const auto &own : weights) EXPECT_EQ(own, expected) << strategy;
  }
}

// The ranks cannot go on, and both learn it at once.
TEST(Agreement, OneRankDiscardsWhatTheOtherHasWrittenAndPublishes) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_NO_SHARD, 2, FSDP_UNSHARD_MAPPED);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    finish_step(rank, 0);
    const double start = now();
    if (r == 0)
      require_error(fsdp_discard_step(rank.model, nullptr), FSDP_PEER_FAILED, {"rank 1", "fsdp_publish_weights"});
    else
      require_error(fsdp_publish_weights(rank.model, nullptr), FSDP_MISMATCH,
                    {"rank 0", "fsdp_discard_step", "the context has failed"});
    REQUIRE(now() - start < scenario.context.timeout_ms / 2e3);
    fsdp_error error = FSDP_ERROR_INIT;
    FSDP(fsdp_get_context_error(context, &error));
    REQUIRE(error.context_failed == 1);
    REQUIRE(!std::strstr(error.message, "to go on"));  // no rank can
  });
}

TEST(Agreement, LearningRatesMustBeTheSame) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_NO_SHARD, 2, FSDP_UNSHARD_MAPPED);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    finish_step(rank, 0);
    require_error(fsdp_step_adamw(rank.model, r ? 0.1 : 0.2, nullptr, nullptr), FSDP_MISMATCH,
                  {"rank 1 gave lr 0.1, rank 0 gave 0.2"});
    FSDP(fsdp_discard_step(rank.model, nullptr));
    finish_step(rank, 0);
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

// Nothing was touched, so the step can be discarded, and the number of the last step is what it was.
TEST(Agreement, AfterAnotherBetaRanksGoOn) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_NO_SHARD, 2, FSDP_UNSHARD_MAPPED);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    clean_step(rank, 0);
    const std::vector<float> before = rank.read(1, 0);
    finish_step(rank, 1);
    fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
    options.beta2 = r ? 0.95 : 0;
    require_error(fsdp_step_adamw(rank.model, 0.1, &options, nullptr), FSDP_MISMATCH,
                  {"rank 1 gave beta2 0.95, rank 0 gave 0.999"});
    FSDP(fsdp_discard_step(rank.model, nullptr));
    REQUIRE(rank.read(1, 0) == before);
    REQUIRE(rank.stats().step == 1);
    clean_step(rank, 1);
    FSDP(fsdp_close_context(context));
  });
}

// The ranks over which a norm is added get the error before anything is scaled, and can repeat the call.
TEST(Agreement, AfterAnotherMaxNormRanksClipAgain) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2, FSDP_UNSHARD_MAPPED);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    finish_step(rank, 0);
    double before = 0, clipped = 0;
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &before));
    require_error(fsdp_clip_grads(rank.model, nullptr, r ? 0.25 : 0.5, nullptr, &clipped), FSDP_MISMATCH,
                  {"rank 1 asked for max_norm 0.25, rank 0 for max_norm 0.5; nothing was scaled"});
    FSDP(fsdp_clip_grads(rank.model, nullptr, 0.5, nullptr, &clipped));
    REQUIRE(clipped == before);
    update(rank);
    FSDP(fsdp_close_context(context));
  });
}

// Ranks compare what their calls do: a default equals its explicit value, and one call equals the calls that it
// combines.
TEST(Agreement, TheSameNumbersInOtherWords) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2, FSDP_UNSHARD_MAPPED);
  // The reference scales by 0.5 at the end of a step; here fsdp_scale_grads does it.
  scenario.scale = 0.5;
  scenario.steps = 3;
  const Outcome expected = reference(scenario);
  scenario.scale = 1;
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    for (uint32_t step = 0; step < 2; ++step) {
      finish_step(rank, step);
      if (r) FSDP(fsdp_scale_grads(rank.model, 1, nullptr));  // does nothing
      FSDP(fsdp_scale_grads(rank.model, 0.5, nullptr));
      fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
      options.weight_decay = scenario.weight_decay;
      if (r) options = {sizeof options, 0.9, 0.999, 1e-8, scenario.weight_decay, step + 1, 0, 0};
      FSDP(fsdp_step_adamw(rank.model, 0.01, &options, nullptr));
    }
    // The scalings of a step that was given up are forgotten.
    finish_step(rank, 2);
    FSDP(fsdp_scale_grads(rank.model, r ? 2 : 3, nullptr));
    FSDP(fsdp_discard_step(rank.model, nullptr));
    finish_step(rank, 2);
    FSDP(fsdp_scale_grads(rank.model, 0.5, nullptr));
    update(rank);
    REQUIRE(same_bits(rank.read_all(), expected.weights));
    FSDP(fsdp_close_context(context));
  });
}

// A rank that passes no data need not agree on the dtype (Loads.UseTheRootsData).
TEST(Agreement, RanksThatLoadFromARootAgreeOnTheDtypeOfTheirData) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_MAPPED);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    const std::vector<float> data(37 * 24, 1.0f);
    const fsdp_status status =
        fsdp_load_param(rank.groups[0], 0, data.data(), r == 0 ? FSDP_FLOAT32 : FSDP_BFLOAT16, data.size(), 0, 0);
    require_error(status, FSDP_MISMATCH, {"float32", "bfloat16"});
  });
}

TEST(Agreement, NanOfAnyRankStaysNan) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_NO_SHARD, 2, FSDP_UNSHARD_MAPPED);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    for (const fsdp_value_op op : {FSDP_VALUE_SUM, FSDP_VALUE_MIN, FSDP_VALUE_MAX})
      for (const uint32_t who : {0u, 1u}) {
        double value = r == who ? std::numeric_limits<double>::quiet_NaN() : 1.0;
        FSDP(fsdp_all_reduce_values(context, nullptr, &value, 1, op));
        REQUIRE(std::isnan(value));
      }
    FSDP(fsdp_close_context(context));
  });
}

TEST(Agreement, ResidentGroupsAndInterleavedSchedulesDoNotGoTogether) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1, FSDP_UNSHARD_MAPPED);
  scenario.schedule = FSDP_SCHEDULE_INTERLEAVED;
  scenario.groups[2].options.flags = FSDP_GROUP_RESIDENT;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario, false);
    require_error(fsdp_seal_model(rank.model), FSDP_INVALID_ARGUMENT, {"'layer.1'"});
    FSDP(fsdp_close_context(context));
  });
}

TEST(Agreement, ASealThatFailsOnOneRankFailsOnAllWithItsStatus) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_MAPPED);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario, false);
    void *arena = std::aligned_alloc(4096, 4096);
    if (r == 1) FSDP(fsdp_set_arena(rank.model, FSDP_ROLE_OPTIMIZER, arena, 512));
    require_error(fsdp_seal_model(rank.model), FSDP_INVALID_ARGUMENT, {"512 bytes"});
    std::free(arena);
    FSDP(fsdp_close_context(context));
  });
}

// Eval visits follow the schedule too, even if it names a group twice.
TEST(Agreement, EvalPassesPrefetchAlongAScheduleThatNamesAGroupTwice) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  scenario.prefetch_small_groups();
  scenario.schedule = FSDP_SCHEDULE_VISITS;
  for (const uint32_t g : {0u, 1u, 0u, 2u, 3u}) scenario.visits.push_back({g, FSDP_FORWARD, 0});
  for (const uint32_t g : {3u, 2u, 0u, 1u, 0u}) scenario.visits.push_back({g, FSDP_BACKWARD, 0});
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    for (int pass = 0; pass < 3; ++pass)
      for (const uint32_t g : {0u, 1u, 0u, 2u, 3u}) {
        FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
        const auto view = rank.view(g, 0, FSDP_EVAL);
        for (uint64_t i = 0; i < view.size(); ++i) REQUIRE(view[i] == initial_weight(scenario.ordinal(g, 0), i));
        FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
      }
    REQUIRE(rank.stats().dropped_prefetches == 0 && rank.stats().prefetches > 0);
    FSDP(fsdp_close_context(context));
  });
}

TEST(Handles, AreDestroyedWhileAnotherThreadCalls) {
  for (int round = 0; round < 300; ++round) {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_MAPPED);
    fsdp_context *context = nullptr;
    FSDP(fsdp_create_local_contexts(1, nullptr, &context));
    auto *rank = new Rank(context, scenario);
    FSDP(fsdp_publish_weights(rank->model, nullptr));
    std::thread caller([&] {
      uint32_t number = 0;
      fsdp_shard shard = FSDP_SHARD_INIT;
      for (;;) {
        if (fsdp_unshard(rank->groups[1], FSDP_FORWARD, 0, nullptr)) break;
        if (fsdp_reshard(rank->groups[1], FSDP_FORWARD, 0, nullptr)) break;
        if (fsdp_get_shard(rank->model, 0, &shard)) break;
        if (fsdp_get_rank(context, &number)) break;
      }
    });
    if (round % 2) std::this_thread::sleep_for(std::chrono::microseconds(round));
    if (round % 3) fsdp_destroy_context(context);
    fsdp_destroy_model(rank->model);
    fsdp_destroy_context(context);
    caller.join();
    rank->model = nullptr;
    delete rank;
  }
}

}  // namespace
