// SPDX-License-Identifier: Apache-2.0
// Events around the update window: discarded steps, loaded weights, the caller's own optimizer.
#include <gtest/gtest.h>

#include <cmath>

#include "harness.h"

using namespace harness;

namespace {

TEST(Window, AnExceptionInForwardThenDiscardThenACleanStep) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = scenario_of(strategy, 3, mode);
      scenario.steps = 1;
      const Outcome expected = reference(scenario);
      run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, scenario);
        rank.load();
        // Each rank is at a different place when it discards.
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        if (r > 0) {
          put_all(rank, 3, 100.0f);
          FSDP(fsdp_reduce_grad(rank.groups[3], 0, nullptr));
        }
        if (r > 1) {
          put_all(rank, 2, 100.0f);
          fsdp_tensor grad = FSDP_TENSOR_INIT;
          int32_t accumulate = -1;
          FSDP(fsdp_acquire_grad(rank.groups[2], 0, 0, nullptr, &grad, &accumulate));
          REQUIRE(accumulate == 1);
        }
        FSDP(fsdp_discard_step(rank.model, nullptr));
        finish_step(rank, 0);
        double norm = 0;
        FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm));
        REQUIRE(std::abs(norm / expected.norms[0] - 1) < 1e-12);
        update(rank);
        REQUIRE(rank.read_all() == expected.weights);
        FSDP(fsdp_close_context(context));
      });
    }
}

TEST(Window, DiscardInTheWindowSkipsTheStep) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    const auto before = rank.read(1, 0);
    finish_step(rank, 0);
    FSDP(fsdp_discard_step(rank.model, nullptr));
    REQUIRE(rank.stats().version == 1);
    REQUIRE(rank.read(1, 0) == before);
    clean_step(rank, 0);
    REQUIRE(rank.stats().version == 2);
    Scenario one = scenario;
    one.steps = 1;
    REQUIRE(same_bits(rank.read_all(), reference(one).weights));
    FSDP(fsdp_close_context(context));
  });
}

TEST(Window, LoadingFromOneRootEqualsLoadingEverywhere) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = scenario_of(strategy, 3, mode);
      scenario.groups.push_back({"large", {{"large.w", {700, 513}}}});
      run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, scenario);
        for (size_t g = 0; g < rank.groups.size(); ++g)
          for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
            std::vector<float> data(rank.def(g).params[p].count());
            for (uint64_t i = 0; i < data.size(); ++i) data[i] = initial_weight(static_cast<uint32_t>(10 * g + p), i);
            FSDP(fsdp_load_param(rank.groups[g], p, r == 2 ? data.data() : nullptr, FSDP_FLOAT32, data.size(), 2, 0));
            REQUIRE(rank.read(g, p) == data);
          }
        FSDP(fsdp_publish_weights(rank.model, nullptr));
        for (size_t g = 0; g < rank.groups.size(); ++g) {
          FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
          for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
            const auto view = rank.view(g, p, FSDP_EVAL);
            for (uint64_t i = 0; i < view.size(); ++i)
              REQUIRE(view[i] == initial_weight(static_cast<uint32_t>(10 * g + p), i));
          }
          FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
        }
        FSDP(fsdp_close_context(context));
      });
    }
}

TEST(Window, TheCallersOptimizerOwnsNamedStates) {
  for (const fsdp_strategy strategy : {1, 4}) {
    Scenario scenario = scenario_of(strategy, 3);
    scenario.model.optimizer = FSDP_OPTIMIZER_CALLER;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario, false);
      FSDP(fsdp_add_optimizer_state(rank.model, "momentum", FSDP_FLOAT32));
      FSDP(fsdp_seal_model(rank.model));
      rank.load();
      for (int s = 0; s < 2; ++s) {
        forward(rank, nullptr);
        for (size_t g = rank.groups.size(); g-- > 0;) {
          put_all(rank, g, 1.0f);
          FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
        }
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        uint64_t index = 0;
        for (const fsdp_shard &shard : rank.shards()) {
          fsdp_tensor momentum = FSDP_TENSOR_INIT;
          FSDP(fsdp_get_shard_state(rank.model, index++, "momentum", &momentum));
          REQUIRE(momentum.element_count == shard.element_count && shard.element_count > 0);
          auto *m = static_cast<float *>(momentum.data);
          for (uint64_t e = 0; e < shard.element_count; ++e) {
            m[e] = 0.5f * m[e] + main_grad(shard)[e];
            main_weight(shard)[e] -= m[e];
          }
        }
        FSDP(fsdp_publish_weights(rank.model, nullptr));
      }
      // 1, then 0.5 * 1 + 1.
      const auto weights = rank.read_all();
      for (uint32_t p = 0; p < weights.size(); ++p)
        for (uint64_t i = 0; i < weights[p].size(); ++i) REQUIRE(weights[p][i] == initial_weight(p, i) - 1.0f - 1.5f);
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Window, BeginUpdateOpensTheWindowOutsideAStep) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_begin_update(rank.model, nullptr));
    require_error(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr), FSDP_INVALID_STATE, {"no gradients"});
    const std::vector<float> sevens(37 * 24, 7.0f);
    FSDP(fsdp_load_param(rank.groups[0], 0, sevens.data(), FSDP_FLOAT32, sevens.size(), FSDP_EVERY_RANK, 0));
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
    REQUIRE(rank.view(0, 0, FSDP_EVAL) == sevens);
    FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
