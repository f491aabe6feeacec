// SPDX-License-Identifier: Apache-2.0
// The moments of AdamW after many steps are compared with the same recurrence in fp64, which shares no code with the
// library. The remaining difference is the rounding of fp32 moments, once per step, whatever beta is.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "device.h"
#include "harness.h"

using namespace harness;

namespace {

constexpr uint64_t count = 1024;
constexpr int step_count = 1000;
constexpr double tolerance = 1.3e-6;  // relative L2 error in fp32

Scenario one_parameter() {
  Scenario setup;
  setup.ranks = 1;
  setup.groups = {{"all", {{"w", {count}}}}};
  return setup;
}

std::vector<float> read_state(Rank &rank, const char *name) {
  fsdp_tensor state = FSDP_TENSOR_INIT;
  FSDP(fsdp_get_shard_state(rank.model, 0, name, &state));
  REQUIRE(state.element_count == count);
  std::vector<float> values(count);
  copy_out(values.data(), state.data, count * sizeof(float));
  return values;
}

double error_of(const std::vector<float> &found, const std::vector<double> &expected) {
  double difference = 0, total = 0;
  for (uint64_t i = 0; i < count; ++i) {
    difference += (found[i] - expected[i]) * (found[i] - expected[i]);
    total += expected[i] * expected[i];
  }
  return std::sqrt(difference / total);
}

struct Errors {
  double first, second;
};

Errors train(Rank &rank, double beta1, double beta2) {
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.beta1 = beta1;
  options.beta2 = beta2;
  if (beta1 == 0) options.flags = FSDP_ADAMW_BETA1_ZERO;
  std::vector<double> first(count), second(count);
  std::mt19937 random(7);
  std::normal_distribution<float> draw(0.5f);
  for (int step = 1; step <= step_count; ++step) {
    std::vector<float> grads(count);
    for (uint64_t i = 0; i < count; ++i) {
      const double g = grads[i] = draw(random);
      first[i] = beta1 * first[i] + (1 - beta1) * g;
      second[i] = beta2 * second[i] + (1 - beta2) * g * g;
    }
    const Placed placed(grads);
    const fsdp_grad grad = {placed.data(), count, FSDP_FLOAT32, 0};
    FSDP(fsdp_apply_grads(rank.model, &grad, 1, sizeof(fsdp_grad), 1e-6, 0, &options, stream(), nullptr));
  }
  return {error_of(read_state(rank, "exp_avg"), first), error_of(read_state(rank, "exp_avg_sq"), second)};
}

class AdamWMoments : public testing::TestWithParam<double> {};

TEST_P(AdamWMoments, AreThoseOfFp64AfterAThousandSteps) {
  const double beta = GetParam();
  const Scenario setup = one_parameter();
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const Errors errors = train(rank, beta, beta == 0 ? 0.1 : beta);
    EXPECT_LT(errors.first, tolerance) << "beta1 " << beta;
    EXPECT_LT(errors.second, tolerance) << "beta2 " << beta;
    FSDP(fsdp_close_context(context));
  });
}

INSTANTIATE_TEST_SUITE_P(Betas, AdamWMoments,
                         testing::Values(0.0, 0.3, 0.5, 0.6, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999));

// The weights after one step from 0 with gradient g: -lr * (m / c1) / (sqrt(v / c2) + epsilon), in fp64.
double stepped(double g, double beta1, double beta2, double epsilon, uint64_t number, double m, double v) {
  m = beta1 * m + (1 - beta1) * g;
  v = beta2 * v + (1 - beta2) * g * g;
  const double c1 = 1 - std::pow(beta1, static_cast<double>(number));
  const double c2 = 1 - std::pow(beta2, static_cast<double>(number));
  return -(m / c1) / (std::sqrt(v / c2) + epsilon);
}

std::vector<float> weights_after(Rank &rank, float g, fsdp_adamw_options options) {
  options.weight_decay = 0;
  const std::vector<float> grads(count, g);
  const Placed placed(grads);
  const fsdp_grad grad = {placed.data(), count, FSDP_FLOAT32, 0};
  FSDP(fsdp_apply_grads(rank.model, &grad, 1, sizeof(fsdp_grad), 1, 0, &options, stream(), nullptr));
  return rank.read(0, 0);
}

void zero_weights(Rank &rank) {
  const std::vector<float> zeros(count, 0.0f);
  FSDP(fsdp_begin_update(rank.model, stream()));
  FSDP(fsdp_load_param(rank.groups[0], 0, zeros.data(), FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
  FSDP(fsdp_publish_weights(rank.model, stream()));
}

// With an epsilon of 1e-8, a gradient of 1e-8 moves the weight half as far as with an epsilon of 0.
TEST(AdamWNumbers, AnEpsilonOfZeroIsNone) {
  const Scenario setup = one_parameter();
  for (const bool none : {false, true})
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      zero_weights(rank);
      fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
      if (none) options.flags = FSDP_ADAMW_EPSILON_ZERO;
      const double expected = stepped(1e-8f, 0.9, 0.999, none ? 0 : 1e-8, 1, 0, 0);
      for (const float weight : weights_after(rank, 1e-8f, options)) REQUIRE(std::abs(weight / expected - 1) < 1e-5);
      REQUIRE(std::abs(expected + (none ? 1 : 0.5)) < 0.01);
      FSDP(fsdp_close_context(context));
    });
}

// A number that is given once is that of the step, and later steps count on from it. A run whose states were loaded is
// resumed in this way.
TEST(AdamWNumbers, CountOnFromTheOneGiven) {
  const Scenario setup = one_parameter();
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    zero_weights(rank);
    fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
    options.step = 7;
    const double first = stepped(0.5, 0.9, 0.999, 1e-8, 7, 0, 0);
    for (const float weight : weights_after(rank, 0.5f, options)) REQUIRE(std::abs(weight / first - 1) < 1e-5);
    options.step = 0;
    const double second = first + stepped(0.25, 0.9, 0.999, 1e-8, 8, 0.1 * 0.5, 0.001 * 0.25);
    for (const float weight : weights_after(rank, 0.25f, options)) REQUIRE(std::abs(weight / second - 1) < 1e-5);
    REQUIRE(rank.stats().step == 8);
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
