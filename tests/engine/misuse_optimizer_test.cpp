// SPDX-License-Identifier: Apache-2.0
// Misuse of the calls on shards, main grads and the optimizer's step.
#include <cmath>
#include <limits>

#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

TEST(MisusedShard, InvalidIndicesAndNamesAreRefused) {
  Solo solo(State::sealed);
  uint64_t count = 0;
  FSDP(fsdp_get_shard_count(solo.model, &count));
  ASSERT_EQ(count, 4u);
  fsdp_shard shard = FSDP_SHARD_INIT;
  fsdp_tensor state = FSDP_TENSOR_INIT;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard(solo.model, 4, &shard), "fsdp_get_shard",
               "shard_index 4 is outside [0, 4)");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard_state(solo.model, 4, "exp_avg", &state), "fsdp_get_shard_state",
               "shard_index 4");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard_state(solo.model, 0, "momentum", &state), "'momentum'",
               "'exp_avg', 'exp_avg_sq'");
  EXPECT_EQ(state.data, nullptr);
  EXPECT_EQ(shard.name, nullptr);
}

// Nothing is allocated before the seal, so a call must not read anything. (The sanitizer builds find a call that does.)
TEST(MisusedGrads, CallsBeforeTheSealAreRefused) {
  Solo solo(State::declared);
  uint64_t count = 7;
  double norm = 7, norms[5];
  int32_t found = 7;
  const char *name = "untouched";
  fsdp_shard shard = FSDP_SHARD_INIT;
  fsdp_tensor state = FSDP_TENSOR_INIT;
  const fsdp_grad grads[4] = {};
  const auto expect_unsealed = [](fsdp_status status, const char *call) {
    EXPECT_FAILS(FSDP_INVALID_STATE, status, call, "not sealed", "fsdp_seal_model");
  };
  expect_unsealed(fsdp_get_shard_count(solo.model, &count), "fsdp_get_shard_count");
  expect_unsealed(fsdp_get_shard(solo.model, 0, &shard), "fsdp_get_shard");
  expect_unsealed(fsdp_get_shard_state(solo.model, 0, "exp_avg", &state), "fsdp_get_shard_state");
  expect_unsealed(fsdp_get_grad_norm(solo.model, nullptr, nullptr, &norm), "fsdp_get_grad_norm");
  expect_unsealed(fsdp_get_param_grad_norms(solo.model, nullptr, norms, 5), "fsdp_get_param_grad_norms");
  expect_unsealed(fsdp_get_param_weight_norms(solo.model, nullptr, norms, 5), "fsdp_get_param_weight_norms");
  expect_unsealed(fsdp_count_zero_grads(solo.model, nullptr, &count), "fsdp_count_zero_grads");
  expect_unsealed(fsdp_scale_grads(solo.model, 2, nullptr), "fsdp_scale_grads");
  expect_unsealed(fsdp_clip_grads(solo.model, nullptr, 2, nullptr, &norm), "fsdp_clip_grads");
  expect_unsealed(fsdp_check_grads(solo.model, nullptr, &found, &name), "fsdp_check_grads");
  expect_unsealed(fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr), "fsdp_step_adamw");
  expect_unsealed(fsdp_apply_grads(solo.model, grads, 4, sizeof *grads, 0.1, 0, nullptr, nullptr, &norm),
                  "fsdp_apply_grads");
  EXPECT_EQ(count, 7u);
  EXPECT_EQ(norm, 7);
  EXPECT_EQ(found, 7);
  EXPECT_STREQ(name, "untouched");
  FSDP(fsdp_seal_model(solo.model));
}

TEST(MisusedGrads, CallsOutsideTheWindowAreRefused) {
  Solo solo(State::published);
  double norm = 7, norms[5];
  int32_t found = 7;
  const char *name = "untouched";
  const std::string remedy = "fsdp_finish_grads";
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_grad_norm(solo.model, nullptr, nullptr, &norm), "fsdp_get_grad_norm",
               "window is closed", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_param_grad_norms(solo.model, nullptr, norms, 5),
               "fsdp_get_param_grad_norms", "window is closed", remedy);
  uint64_t zeros = 7;
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_count_zero_grads(solo.model, nullptr, &zeros), "fsdp_count_zero_grads",
               "window is closed", remedy);
  EXPECT_EQ(zeros, 7u);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_scale_grads(solo.model, 2, nullptr), "fsdp_scale_grads", "window is closed",
               remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_clip_grads(solo.model, nullptr, 2, nullptr, &norm), "fsdp_clip_grads",
               "window is closed", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_check_grads(solo.model, nullptr, &found, &name), "fsdp_check_grads",
               "window is closed", remedy);
  EXPECT_EQ(norm, 7);
  EXPECT_EQ(found, 7);
  EXPECT_STREQ(name, "untouched");
  solo.clean_step();
}

TEST(MisusedGrads, InvalidNormsAndFactorsAreRefused) {
  Solo solo(State::published);
  solo.finish_step();
  double norm = 0, after = 0, norms[5];
  FSDP(fsdp_get_grad_norm(solo.model, nullptr, nullptr, &norm));
  const Outcome expected = one_step(solo.setup);
  EXPECT_NEAR(norm, expected.norms[0], 1e-12 * expected.norms[0]);  // added in another order
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param_grad_norms(solo.model, nullptr, norms, 4), "norm_count is 4",
               "5 parameters");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param_weight_norms(solo.model, nullptr, norms, 6),
               "fsdp_get_param_weight_norms", "norm_count is 6", "5 parameters");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_scale_grads(solo.model, not_a_number, nullptr), "factor is nan");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_scale_grads(solo.model, infinity, nullptr), "factor is inf");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_scale_grads(solo.model, 1e39, nullptr), "factor is 1e+39", "fp32");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_clip_grads(solo.model, nullptr, 0, nullptr, nullptr), "fsdp_clip_grads",
               "max_norm is 0");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_clip_grads(solo.model, nullptr, -1, nullptr, nullptr), "max_norm is -1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_clip_grads(solo.model, nullptr, not_a_number, nullptr, nullptr),
               "max_norm is nan");
  FSDP(fsdp_get_grad_norm(solo.model, nullptr, nullptr, &after));
  EXPECT_EQ(norm, after);
  EXPECT_WORKS(fsdp_step_adamw(solo.model, 0.01, nullptr, nullptr));
  EXPECT_TRUE(same_bits(solo.rank->read_all(), expected.weights)) << "a refused call has changed the gradients";
}

// 2^64 - 8 would read before the array.
TEST(MisusedStep, InvalidStridesOfGradsAreRefused) {
  Solo solo(State::published);
  fsdp_grad grads[4] = {};
  for (const uint64_t stride : {uint64_t{0}, uint64_t{8}, sizeof(fsdp_grad) + 4, UINT64_MAX - 7, uint64_t{1} << 40})
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT,
                 fsdp_apply_grads(solo.model, grads, 4, stride, 0.1, 0, nullptr, nullptr, nullptr),
                 "grad_stride is " + std::to_string(stride), "sizeof(fsdp_grad)");
  fsdp_tensor views[8];
  int32_t accumulate[8];
  for (const uint64_t stride : {uint64_t{0}, uint64_t{8}, sizeof(fsdp_tensor) + 4, UINT64_MAX - 7})
    EXPECT_FAILS(
        FSDP_INVALID_ARGUMENT,
        fsdp_acquire_grads(solo.group(0), 0, nullptr, views, solo.setup.groups[0].params.size(), stride, accumulate),
        "grad_stride is " + std::to_string(stride), "sizeof(fsdp_tensor)");
  solo.clean_step();
}

TEST(MisusedStep, InvalidAdamWOptionsAreRefused) {
  Solo solo(State::published);
  solo.finish_step();
  const std::vector<float> before = solo.rank->read(0, 0);
  const auto with = [&](auto field, auto value) {
    fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
    options.*field = value;
    return fsdp_step_adamw(solo.model, 0.01, &options, nullptr);
  };
  using Options = fsdp_adamw_options;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_step_adamw(solo.model, not_a_number, nullptr, nullptr), "fsdp_step_adamw",
               "lr is nan");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_step_adamw(solo.model, infinity, nullptr, nullptr), "lr is inf");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_step_adamw(solo.model, 1e39, nullptr, nullptr), "lr is 1e+39", "fp32");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::step, UINT64_MAX),
               "fsdp_adamw_options.step is 18446744073709551615");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::weight_decay, 1e39), "weight_decay is 1e+39");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::beta1, 1.0), "beta1 is 1", "[0, 1)");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::beta1, -0.1), "beta1 is -0.1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::beta2, not_a_number), "beta2 is nan");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::beta2, 1.5), "beta2 is 1.5");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::epsilon, -1e-8), "epsilon is -1e-08");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::epsilon, not_a_number), "epsilon is nan");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::weight_decay, -1.0), "weight_decay is -1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::weight_decay, infinity), "weight_decay is inf");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::flags, 2u), "fsdp_adamw_options.flags", "0x2");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::reserved, 1u), "fsdp_adamw_options.reserved is 1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(&Options::struct_size, uint64_t{48}),
               "fsdp_adamw_options.struct_size is 48");
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.flags = FSDP_ADAMW_BETA1_ZERO;
  options.beta1 = 0.5;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_step_adamw(solo.model, 0.01, &options, nullptr), "FSDP_ADAMW_BETA1_ZERO",
               "beta1 0.5");
  Newer<fsdp_adamw_options> newer(FSDP_ADAMW_OPTIONS_INIT);
  EXPECT_FAILS(FSDP_UNSUPPORTED, fsdp_step_adamw(solo.model, 0.01, &newer.options, nullptr),
               Newer<fsdp_adamw_options>::byte());
  EXPECT_EQ(solo.rank->read(0, 0), before);
  EXPECT_EQ(solo.rank->stats().step, 0u);
  EXPECT_WORKS(fsdp_step_adamw(solo.model, 0.01, nullptr, nullptr));
  EXPECT_EQ(solo.rank->stats().step, 1u);
  EXPECT_TRUE(same_bits(solo.rank->read_all(), one_step(solo.setup).weights)) << "a refused step has left something";
}

TEST(MisusedStep, ACallersOptimizerHasNoAdamW) {
  Scenario setup = small_setup();
  setup.model.optimizer = FSDP_OPTIMIZER_CALLER;
  Solo solo(State::published, setup);
  const fsdp_grad grads[4] = {};
  EXPECT_FAILS(FSDP_INVALID_STATE,
               fsdp_apply_grads(solo.model, grads, 4, sizeof(fsdp_grad), 0.1, 0, nullptr, nullptr, nullptr),
               "fsdp_apply_grads", "FSDP_OPTIMIZER_CALLER");
  solo.finish_step();  // the refused call left no gradients, and the window closed
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr), "fsdp_step_adamw",
               "FSDP_OPTIMIZER_CALLER");
  fsdp_tensor state = FSDP_TENSOR_INIT;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard_state(solo.model, 0, "exp_avg", &state), "'exp_avg'",
               "it has: none");
  EXPECT_WORKS(fsdp_publish_weights(solo.model, nullptr));
}

TEST(MisusedStep, InvalidGradientsAreRefused) {
  Solo solo(State::published);
  const std::vector<float> data(32, 1.0f);
  const auto before = solo.rank->read_all();
  fsdp_grad grads[4] = {{data.data(), 32, FSDP_FLOAT32, 0},
                        {data.data(), 24, FSDP_FLOAT32, 0},
                        {data.data(), 6, FSDP_FLOAT32, 0},
                        {nullptr, 0, 0, 0}};
  const auto apply = [&](uint64_t count = 4, double max_norm = 0, double lr = 0.1,
                         const fsdp_adamw_options *options = nullptr) {
    double norm = 7;
    const fsdp_status status =
        fsdp_apply_grads(solo.model, grads, count, sizeof(fsdp_grad), lr, max_norm, options, nullptr, &norm);
    EXPECT_EQ(norm, status == FSDP_OK ? std::sqrt(32.0 + 24 + 6) : 7);
    return status;
  };
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(3), "fsdp_apply_grads", "grad_count is 3", "4 trainable");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(5), "grad_count is 5");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(0), "grad_count is 0");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(4, -1), "max_norm is -1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(4, not_a_number), "max_norm is nan");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(4, 0, not_a_number), "lr is nan");
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.beta2 = 2;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(4, 0, 0.1, &options), "fsdp_apply_grads", "beta2 is 2");
  grads[1].element_count = 23;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(), "grads[1]", "'beta.w'", "24 elements", "element_count is 23");
  grads[1].element_count = 24;
  grads[2].dtype = 0;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(), "grads[2].dtype", "0 is not a dtype");
  grads[2].dtype = FSDP_FLOAT32;
  grads[3].reserved = 1;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, apply(), "grads[3].reserved", "must be 0");
  grads[3].reserved = 0;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT,
               fsdp_apply_grads(solo.model, grads, 4, sizeof(fsdp_grad), 0.1, 0, nullptr, some_stream(), nullptr),
               "pass NULL");
  EXPECT_TRUE(same_bits(solo.rank->read_all(), before)) << "a refused call has stepped";
  EXPECT_WORKS(apply());
  const auto after = solo.rank->read_all();
  for (const size_t p : {0, 2, 3})  // alpha.w, beta.w, beta.b: a first step of AdamW is lr long
    for (size_t i = 0; i < after[p].size(); ++i) EXPECT_NEAR(after[p][i], before[p][i] - 0.1, 2e-7) << p << ", " << i;
  for (const size_t p : {1, 4}) EXPECT_EQ(after[p], before[p]);  // alpha.frozen; gamma.w, whose gradient is zeros
  solo.clean_step();
}

}  // namespace
