// SPDX-License-Identifier: Apache-2.0
// A failure has the same text on every rank.
#include <gtest/gtest.h>

#include <set>

#include "harness.h"

using namespace harness;

namespace {

constexpr uint32_t world_size = 3;

// What each rank's failing call says; then the context goes on.
std::set<std::string> texts_of(const std::function<fsdp_status(uint32_t, fsdp_context *)> &call) {
  Scenario scenario;
  scenario.ranks = world_size;
  scenario.context.timeout_ms = 20'000;
  std::vector<std::string> texts(world_size), errors;
  run_threads(
      scenario,
      [&](uint32_t rank, fsdp_context *context) {
        const fsdp_status status = call(rank, context);
        fsdp_error error = FSDP_ERROR_INIT;
        fsdp_get_last_error(context, &error);
        texts[rank] =
            std::string(fsdp_get_status_name(status)) + " of rank " + std::to_string(error.rank) + ": " + error.message;
      },
      &errors);
  for (const std::string &error : errors) EXPECT_EQ(error, "");
  return {texts.begin(), texts.end()};
}

void expect_one(const std::set<std::string> &texts, const std::vector<std::string> &words) {
  for (const std::string &text : texts) {
    EXPECT_EQ(text, *texts.begin());
    for (const std::string &word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
  }
}

TEST(SameText, OfValuesThatDiffer) {
  expect_one(texts_of([](uint32_t rank, fsdp_context *context) {
               double values[3] = {};
               return fsdp_all_reduce_values(context, nullptr, values, rank == 2 ? 3 : 2, FSDP_VALUE_SUM);
             }),
             {"FSDP_MISMATCH of rank 2", "rank 2 reduces 3 values", "rank 0 reduces 2"});
  expect_one(texts_of([](uint32_t rank, fsdp_context *context) {
               double values[3] = {};
               return fsdp_all_reduce_values(context, nullptr, values, 1, rank + FSDP_VALUE_SUM);
             }),
             {"FSDP_MISMATCH of rank 1"});
}

TEST(SameText, OfASealThatOneRankCannotDo) {
  alignas(4096) static std::byte small[4096];
  expect_one(texts_of([](uint32_t rank, fsdp_context *context) {
               Scenario scenario;
               scenario.ranks = world_size;
               scenario.model.unshard_mode = FSDP_UNSHARD_COPIED;
               scenario.groups = odd_groups();
               Rank self(context, scenario, false);
               if (rank == 1) FSDP(fsdp_set_arena(self.model, FSDP_ROLE_OPTIMIZER, small, sizeof small));
               return fsdp_seal_model(self.model);
             }),
             {"FSDP_INVALID_ARGUMENT of rank 1: rank 1: ", "fsdp_set_arena", "has 4096 bytes"});
}

// What a rank of a sealed model calls, its weights loaded; by default the mesh is one axis of all ranks.
std::set<std::string> texts_of_model(const std::function<fsdp_status(Rank &)> &call,
                                     fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS) {
  const Scenario scenario = scenario_of(strategy, world_size, FSDP_UNSHARD_MAPPED);
  return texts_of([&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    return call(rank);
  });
}

fsdp_status finish(Rank &rank, double scale = 1) { return fsdp_finish_grads(rank.model, scale, 0, nullptr); }

void open_window(Rank &rank) {
  reduce_all(rank, 1);
  FSDP(finish(rank));
}

// The others are compared with the first rank, even if it is the odd one.
TEST(SameText, OfNumbersThatDiffer) {
  for (const uint32_t odd : {0u, 1u, 2u})
    expect_one(texts_of_model([&](Rank &rank) {
                 open_window(rank);
                 fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
                 options.beta1 = rank.rank == odd ? 0.8 : 0.9;
                 return fsdp_step_adamw(rank.model, 0.1, &options, nullptr);
               }),
               odd == 0 ? std::vector<std::string>{"FSDP_MISMATCH of rank 1", "rank 1 gave beta1 0.9, rank 0 gave 0.8"}
               : odd == 1
                   ? std::vector<std::string>{"FSDP_MISMATCH of rank 1", "rank 1 gave beta1 0.8, rank 0 gave 0.9"}
                   : std::vector<std::string>{"FSDP_MISMATCH of rank 2", "rank 2 gave beta1 0.8, rank 0 gave 0.9"});
}

TEST(SameText, OfScalesRatesAndScalingsThatDiffer) {
  expect_one(texts_of_model([](Rank &rank) {
               reduce_all(rank, 1);
               return finish(rank, rank.rank + 1);
             }),
             {"FSDP_MISMATCH of rank 1", "rank 1 gave scale 2, rank 0 gave 1", "call fsdp_discard_step on every rank"});
  expect_one(texts_of_model([](Rank &rank) {
               open_window(rank);
               return fsdp_step_adamw(rank.model, rank.rank == 2 ? 0.1 : 0.2, nullptr, nullptr);
             }),
             {"FSDP_MISMATCH of rank 2", "rank 2 gave lr 0.1, rank 0 gave 0.2"});
  expect_one(texts_of_model([](Rank &rank) {
               open_window(rank);
               FSDP(fsdp_scale_grads(rank.model, rank.rank == 2 ? 2 : 3, nullptr));
               return fsdp_publish_weights(rank.model, nullptr);
             }),
             {"FSDP_MISMATCH of rank 2",
              "number 1 of this step was fsdp_scale_grads by 2 on rank 2, fsdp_scale_grads by 3 on rank 0"});
}

TEST(SameText, OfContributionsThatDiffer) {
  expect_one(texts_of([&](uint32_t r, fsdp_context *context) {
               Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, world_size);
               scenario.mesh.replicate_size = world_size;
               scenario.microbatches = r == 2 ? 2 : 1;
               Rank rank(context, scenario);
               rank.load();
               for (uint32_t m = 0; m < scenario.microbatches; ++m) backward(rank, 0, m, nullptr);
               return finish(rank);
             }),
             {"FSDP_MISMATCH of rank 2", "rank 2 reduced 8 contributions of groups in this step, rank 0 reduced 4"});
}

TEST(SameText, OfLrScalesThatDiffer) {
  expect_one(texts_of_model([](Rank &rank) {
               if (rank.rank) FSDP(fsdp_set_param_lr_scale(rank.groups[1], 0, 1.0 + rank.rank));
               reduce_all(rank, 1);
               return finish(rank);
             }),
             {"FSDP_MISMATCH of rank 1", "rank 1 has lr_scale 2 for parameter", "of group 'layer.0', rank 0 1"});
}

TEST(SameText, OfParametersThatSomeDoNotTrain) {
  expect_one(texts_of_model([](Rank &rank) {
               if (rank.rank) FSDP(fsdp_set_param_trainable(rank.groups[rank.rank], 0, 0));
               return fsdp_begin_update(rank.model, nullptr);
             }),
             {"FSDP_MISMATCH of rank 1", "rank 1 does not train parameter", "of group 'layer.0', rank 0 does"});
}

// If calls differ, none counts as the right one: each is named, with the first rank that made it.
TEST(SameText, OfCallsThatDiffer) {
  expect_one(
      texts_of_model(
          [](Rank &rank) {
            if (rank.rank == 2) return fsdp_begin_update(rank.model, nullptr);
            reduce_all(rank, 1);
            return finish(rank);
          },
          FSDP_STRATEGY_NO_SHARD),
      {"FSDP_MISMATCH of rank 2: model 0: the step cannot end: ",
       "rank 0 called fsdp_finish_grads, rank 2 called fsdp_begin_update", "call fsdp_discard_step on every rank"});
}

TEST(SameText, OfWhatRanksMiss) {
  expect_one(texts_of_model([](Rank &rank) {
               reduce_all(rank, 1);
               if (rank.rank) FSDP(fsdp_unshard(rank.groups[rank.rank], FSDP_FORWARD, 0, nullptr));
               return finish(rank);
             }),
             {"FSDP_INVALID_STATE of rank 1: fsdp_finish_grads: ", "rank 1: group 'layer.0' is still held",
              "rank 2: group 'layer.1' is still held"});
}

TEST(SameText, OfNormsThatDiffer) {
  for (const uint32_t odd : {0u, 2u})
    expect_one(texts_of_model([&](Rank &rank) {
                 open_window(rank);
                 if (rank.rank == odd) return fsdp_get_grad_norm(rank.model, nullptr, nullptr, nullptr);
                 return fsdp_clip_grads(rank.model, nullptr, 0.5, nullptr, nullptr);
               }),
               odd == 0 ? std::vector<std::string>{"FSDP_MISMATCH of rank 1",
                                                   "rank 1 asked for max_norm 0.5, rank 0 for the norm alone"}
                        : std::vector<std::string>{"FSDP_MISMATCH of rank 2",
                                                   "rank 2 asked for the norm alone, rank 0 for max_norm 0.5"});
}

// With two models of the same ranks the message names the right one: at the seal, the end of a step, a norm, a step.
TEST(SameText, NamesTheModel) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, world_size, FSDP_UNSHARD_MAPPED);
  using Call = std::function<fsdp_status(Rank &)>;
  const Call calls[] = {
      [](Rank &rank) {
        reduce_all(rank, 1);
        return finish(rank, rank.rank + 1);
      },
      [](Rank &rank) {
        open_window(rank);
        return fsdp_clip_grads(rank.model, nullptr, rank.rank + 1, nullptr, nullptr);
      },
      [](Rank &rank) {
        open_window(rank);
        return fsdp_step_adamw(rank.model, rank.rank + 1, nullptr, nullptr);
      },
  };
  for (const Call &call : calls)
    for (const uint32_t meant : {0u, 1u})
      expect_one(texts_of([&](uint32_t, fsdp_context *context) {
                   Rank first(context, scenario), second(context, scenario);
                   first.load();
                   second.load();
                   return call(meant ? second : first);
                 }),
                 {"FSDP_MISMATCH of rank 1", "model " + std::to_string(meant) + ": "});
  expect_one(texts_of([&](uint32_t r, fsdp_context *context) {
               const Rank first(context, scenario);
               Scenario other = scenario;
               other.model.grad_op = r == 2 ? FSDP_GRAD_OP_SUM : FSDP_GRAD_OP_MEAN;
               Rank second(context, other, false);
               return fsdp_seal_model(second.model);
             }),
             {"FSDP_MISMATCH of rank 2", "fsdp_seal_model: model 1: ranks declared it differently"});
}

}  // namespace
