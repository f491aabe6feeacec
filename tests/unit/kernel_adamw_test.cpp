// SPDX-License-Identifier: Apache-2.0
#include "adamw_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

void update(const AdamW &step, const AdamWSpan &span) { kernels::adamw(step, {&span, 1}); }

struct State {
  Elements weight, grad, exp_avg, exp_avg_sq, compute;
  State(size_t count, size_t offset, fsdp_dtype dtype, Values values)
      : weight(FSDP_FLOAT32, count, offset),
        grad(FSDP_FLOAT32, count, offset / 2),
        exp_avg(FSDP_FLOAT32, count, offset),
        exp_avg_sq(FSDP_FLOAT32, count, 0),
        compute(dtype, count + 1, offset) {
    weight.fill(1, values);
    grad.fill(2, values);
  }
  AdamWSpan span(void *to, fsdp_dtype dtype, size_t count) {
    return {weight.floats(), grad.floats(), exp_avg.floats(), exp_avg_sq.floats(), to, dtype, count};
  }
};

void check(size_t count, size_t offset, fsdp_dtype dtype, Values values) {
  State actual(count, offset, dtype, values), expected(count, 0, dtype, values);
  for (int number = 1; number <= 3; ++number) {
    update(make_step(number), actual.span(actual.compute.data(), dtype, count));
    for (size_t i = 0; i < count; ++i) {
      update_one(make_step(number), expected.grad[i], expected.weight.floats()[i], expected.exp_avg.floats()[i],
                 expected.exp_avg_sq.floats()[i]);
      ASSERT_TRUE(same(actual.weight[i], expected.weight[i])) << i << " of " << count << ", step " << number;
      ASSERT_TRUE(same(actual.exp_avg[i], expected.exp_avg[i])) << i;
      ASSERT_TRUE(same(actual.exp_avg_sq[i], expected.exp_avg_sq[i])) << i;
      ASSERT_TRUE(same(actual.compute[i], round_to(expected.weight[i], dtype))) << i;
    }
    ASSERT_EQ(actual.compute[count], 0.0f);
  }
}

TEST(KernelAdamW, SameBitsAsTheDefinition) {
  on_every_target([] {
    for (const fsdp_dtype dtype : dtypes)
      for (const Values values : {Values::ordinary, Values::awkward})
        for (size_t count = 0; count < 68; ++count) check(count, count % 4, dtype, values);
    check(100003, 1, FSDP_BFLOAT16, Values::ordinary);
  });
}

// Short spans are compared with the definition above.
TEST(KernelAdamW, LongSpansHaveTheBitsOfShortSpans) {
  on_every_target([] {
    constexpr size_t count = kernels::streaming_bytes / sizeof(float) + 8 * 1024 + 77, shorter = 1000;
    State whole(count, 1, FSDP_BFLOAT16, Values::ordinary), parts(count, 1, FSDP_BFLOAT16, Values::ordinary);
    update(make_step(1), whole.span(whole.compute.data(), FSDP_BFLOAT16, count));
    const AdamWSpan all = parts.span(parts.compute.data(), FSDP_BFLOAT16, count);
    for (size_t i = 0; i < count; i += shorter)
      update(make_step(1), {all.weight + i, all.grad + i, all.exp_avg + i, all.exp_avg_sq + i,
                            static_cast<uint16_t *>(all.compute) + i, FSDP_BFLOAT16, std::min(shorter, count - i)});
    for (size_t i = 0; i < count; ++i) {
      ASSERT_TRUE(same(whole.weight[i], parts.weight[i])) << i;
      ASSERT_TRUE(same(whole.exp_avg[i], parts.exp_avg[i])) << i;
      ASSERT_TRUE(same(whole.exp_avg_sq[i], parts.exp_avg_sq[i])) << i;
      ASSERT_TRUE(same(whole.compute[i], parts.compute[i])) << i;
    }
  });
}

TEST(KernelAdamW, WeightsWithoutACopyAreUpdatedAlike) {
  State none(33, 1, FSDP_FLOAT32, Values::ordinary), itself(33, 1, FSDP_FLOAT32, Values::ordinary),
      copied(33, 1, FSDP_FLOAT32, Values::ordinary);
  update(make_step(1), none.span(nullptr, 0, 33));
  update(make_step(1), itself.span(itself.weight.data(), FSDP_FLOAT32, 33));
  update(make_step(1), copied.span(copied.compute.data(), FSDP_FLOAT32, 33));
  EXPECT_EQ(std::memcmp(none.weight.data(), itself.weight.data(), 33 * 4), 0);
  EXPECT_EQ(std::memcmp(none.weight.data(), copied.weight.data(), 33 * 4), 0);
  EXPECT_EQ(std::memcmp(none.weight.data(), copied.compute.data(), 33 * 4), 0);
}

// The first step of Adam moves each weight by lr in the direction of its gradient, whatever the gradient's size.
TEST(KernelAdamW, FirstStepMovesByTheLearningRate) {
  float weight[3] = {0, 0, 0}, m[3] = {}, v[3] = {};
  const float grad[3] = {1e-3f, -5, 200};
  AdamW step = make_step(1);
  step.weight_decay = 0;
  update(step, {weight, grad, m, v, nullptr, 0, 3});
  EXPECT_NEAR(weight[0], -1e-3, 1e-7);
  EXPECT_NEAR(weight[1], 1e-3, 1e-7);
  EXPECT_NEAR(weight[2], -1e-3, 1e-7);
}

// The test runs thirty times longer than the average remembers. An error in beta, or in the part of beta that fp32
// drops, shows in full, while roundings go either way and cancel.
TEST(KernelAdamW, AveragesHaveNoBiasAfterTheirMemory) {
  if (sanitized) GTEST_SKIP() << "nothing that a sanitizer sees";
  constexpr size_t count = 256;
  constexpr int steps = 300'000;
  State state(count, 0, FSDP_FLOAT32, Values::ordinary);
  AdamW step = make_step(1);
  step.second = average_of(0.9999);
  std::vector<double> expected(count);
  std::mt19937 random(3);
  std::vector<float> drawn(count + 1009);
  for (float &value : drawn) value = random_value(random, Values::ordinary);
  for (int s = 0; s < steps; ++s) {
    std::copy_n(drawn.data() + s % 1009, count, state.grad.floats());
    update(step, state.span(nullptr, 0, count));
    for (size_t i = 0; i < count; ++i)
      expected[i] += (1 - 0.9999) * (double(state.grad[i]) * state.grad[i] - expected[i]);
  }
  double bias = 0;
  for (size_t i = 0; i < count; ++i) bias += state.exp_avg_sq[i] / expected[i] - 1;
  EXPECT_LT(std::abs(bias / count), 1.3e-6);
}

#if defined(FSDP_HAS_FLOAT_MODES)
TEST(KernelAdamW, DoesNotDependOnTheCallersModes) {
  on_every_target([] {
    const AdamW step = make_step(1);  // in the standard modes
    State usual(257, 1, FSDP_BFLOAT16, Values::awkward), odd(257, 1, FSDP_BFLOAT16, Values::awkward);
    for ([[maybe_unused]] const auto modes : odd_modes)
      update(step, usual.span(usual.compute.data(), FSDP_BFLOAT16, 257));
    with_odd_modes([&] { update(step, odd.span(odd.compute.data(), FSDP_BFLOAT16, 257)); });
    EXPECT_EQ(std::memcmp(usual.weight.data(), odd.weight.data(), 257 * 4), 0);
    EXPECT_EQ(std::memcmp(usual.exp_avg_sq.data(), odd.exp_avg_sq.data(), 257 * 4), 0);
    EXPECT_EQ(std::memcmp(usual.compute.data(), odd.compute.data(), 257 * 2), 0);
  });
}
#endif

}  // namespace
}  // namespace fsdp::test
