// SPDX-License-Identifier: Apache-2.0
// Learning rates of parameters: their effect in a step, their value in a descriptor, and ranks that set different ones.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "harness.h"

using namespace harness;

namespace {

fsdp_param info_of(fsdp_group *group, uint64_t param_index) {
  fsdp_param info = FSDP_PARAM_INIT;
  FSDP(fsdp_get_param_info(group, param_index, &info));
  return info;
}

// Gradients of 1 and a first step of AdamW move every weight by lr times its scale, up to epsilon.
void step_by(Rank &rank, double lr) {
  reduce_all(rank, 1.0f);
  FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
  FSDP(fsdp_step_adamw(rank.model, lr, nullptr, nullptr));
}

TEST(LrScale, ChangesFromTheNextStepOn) {
  for (const fsdp_strategy strategy : {1, 4}) {
    const Scenario scenario = scenario_of(strategy, 2);
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      const std::vector<float> before = rank.read(0, 0), other = rank.read(2, 0);
      FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, 3.0));
      fsdp_param info = FSDP_PARAM_INIT;
      FSDP(fsdp_get_param_info(rank.groups[0], 0, &info));
      REQUIRE(info.lr_scale == 3.0);
      step_by(rank, 0.01);
      const std::vector<float> after = rank.read(0, 0), other_after = rank.read(2, 0);
      for (size_t i = 0; i < before.size(); ++i) REQUIRE(std::abs(before[i] - after[i] - 0.03f) < 1e-5f);
      for (size_t i = 0; i < other.size(); ++i) REQUIRE(std::abs(other[i] - other_after[i] - 0.01f) < 1e-5f);
      FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, 0.0));
      step_by(rank, 0.01);
      REQUIRE(rank.read(0, 0) == after);
      require_error(fsdp_set_param_lr_scale(rank.groups[0], 0, -1.0), FSDP_INVALID_ARGUMENT,
                    {"lr_scale is -1", "must not be negative"});
      require_error(fsdp_set_param_lr_scale(rank.groups[0], 0, 1e39), FSDP_INVALID_ARGUMENT,
                    {"lr_scale is 1e+39", "fp32"});
      require_error(fsdp_set_param_lr_scale(rank.groups[0], 99, 1.0), FSDP_INVALID_ARGUMENT, {"param_index 99"});
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(LrScale, ZeroIsMeantWithItsFlag) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  scenario.groups[0].params[0].flags = FSDP_PARAM_LR_ZERO;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    const std::vector<float> before = rank.read(0, 0), other = rank.read(2, 0);
    step_by(rank, 0.01);
    REQUIRE(rank.read(0, 0) == before);
    REQUIRE(rank.read(2, 0) != other);
    FSDP(fsdp_close_context(context));
  });
}

// The descriptor of a parameter declares the same one again.
TEST(LrScale, ZeroIsInTheDescriptorWithItsFlag) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_NO_SHARD, 1);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    const auto shows = [&](double lr_scale, bool zero) {
      const fsdp_param info = info_of(rank.groups[0], 0);
      const fsdp_shard shard = rank.shards().front();
      return info.lr_scale == lr_scale && shard.lr_scale == lr_scale && !!(info.flags & FSDP_PARAM_LR_ZERO) == zero &&
             !!(shard.flags & FSDP_PARAM_LR_ZERO) == zero;
    };
    fsdp_model *again = nullptr;
    FSDP(fsdp_create_model(context, nullptr, &again));
    for (const double lr_scale : {0.0, 0.5, -0.0, 2.0}) {
      FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, lr_scale));
      REQUIRE(shows(lr_scale, lr_scale == 0));
      fsdp_param info = info_of(rank.groups[0], 0);
      const std::string name = "at " + std::to_string(lr_scale);
      info.name = name.c_str();
      fsdp_group *group = nullptr;
      FSDP(fsdp_create_group(again, name.c_str(), &info, 1, sizeof info, nullptr, &group));
      REQUIRE(info_of(group, 0).lr_scale == lr_scale);
    }
    fsdp_destroy_model(again);
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

// Any thread may read the descriptor, and gets a value that was set at some moment.
TEST(LrScale, IsReadWholeWhileItChanges) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_NO_SHARD, 1);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    std::atomic<bool> ended{false};
    std::atomic<uint64_t> halves{0}, reads{0};
    std::thread reader([&] {
      for (; !ended; ++reads) {
        fsdp_param info = FSDP_PARAM_INIT;
        if (fsdp_get_param_info(rank.groups[0], 0, &info)) ++halves;
        if ((info.lr_scale == 0) != !!(info.flags & FSDP_PARAM_LR_ZERO)) ++halves;
      }
    });
    const double end = now() + 0.5;
    for (uint64_t i = 0; now() < end || reads < 1000; ++i)
      FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, i % 2 ? 0.0 : 0.5));
    ended = true;
    reader.join();
    REQUIRE(halves == 0);
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

TEST(LrScale, MustBeAlikeOnEveryRank) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, 1.5));
    FSDP(fsdp_set_param_lr_scale(rank.groups[3], 1, r ? 2.0 : 3.0));
    reduce_all(rank, 1);
    require_error(fsdp_finish_grads(rank.model, 1.0, 0, nullptr), FSDP_MISMATCH,
                  {"rank 1 has lr_scale 2 for parameter 'head.norm' of group 'head', rank 0 3"});
  });
}

// The ranks compare the learning rates, not the calls that set them.
TEST(LrScale, CanBeMadeAlikeAgain) {
  for (const fsdp_strategy strategy : {1, 4}) {
    const Scenario scenario = scenario_of(strategy, 2);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      const std::vector<float> before = rank.read(0, 0), other = rank.read(2, 0);
      FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, r ? 0.5 : 0.625));
      for (int turn = 0; turn < 2; ++turn) {
        reduce_all(rank, 1);
        require_error(fsdp_finish_grads(rank.model, 1.0, 0, nullptr), FSDP_MISMATCH, {"lr_scale"});
        FSDP(fsdp_discard_step(rank.model, nullptr));
      }
      FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, 0.5));
      // Changes a rate and restores it.
      if (r) {
        FSDP(fsdp_set_param_lr_scale(rank.groups[2], 0, 7));
        FSDP(fsdp_set_param_lr_scale(rank.groups[2], 0, 1));
        FSDP(fsdp_set_param_lr_scale(rank.groups[1], 0, 1));  // its rate already
      }
      step_by(rank, 0.01);
      const std::vector<float> after = rank.read(0, 0), other_after = rank.read(2, 0);
      for (size_t i = 0; i < before.size(); ++i) REQUIRE(std::abs(before[i] - after[i] - 0.005f) < 1e-5f);
      for (size_t i = 0; i < other.size(); ++i) REQUIRE(std::abs(other[i] - other_after[i] - 0.01f) < 1e-5f);
      FSDP(fsdp_close_context(context));
    });
  }
}

// There is no step to discard yet, so the ranks publish again.
TEST(LrScale, CanBeMadeAlikeBeforeTheFirstPublish) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    if (r) FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, 0.5));
    for (int turn = 0; turn < 2; ++turn) {
      require_error(fsdp_publish_weights(rank.model, nullptr), FSDP_MISMATCH,
                    {"rank 1 has lr_scale 0.5 for parameter", "rank 0 1", "call fsdp_publish_weights again"});
      REQUIRE(last_message().find("fsdp_discard_step") == std::string::npos);
    }
    if (r) FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, 1));
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    step_by(rank, 0.01);
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
