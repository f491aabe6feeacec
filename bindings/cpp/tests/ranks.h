// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of the test's process, and a model for them.
#ifndef FSDP_BINDINGS_CPP_TESTS_RANKS_H
#define FSDP_BINDINGS_CPP_TESTS_RANKS_H

#include <gtest/gtest.h>
#include <fsdp.hpp>

#include <cmath>
#include <thread>

/** Runs rank(context) on threads with a context each. What a rank throws fails the test. */
template <typename Rank>
void run_ranks(std::uint32_t world_size, Rank rank, fsdp::ContextOptions options = {}) {
  if (options.timeout_ms == 0) options.timeout_ms = 20000;
  std::vector<fsdp::Context> contexts = fsdp::Context::local(world_size, options);
  std::vector<std::thread> threads;
  for (fsdp::Context &context : contexts)
    threads.emplace_back([&rank, owned = std::move(context)]() mutable {
      try {
        rank(owned);
      } catch (const std::exception &error) {
        ADD_FAILURE() << error.what();
      }
    });
  for (std::thread &thread : threads) thread.join();
}

/** 0.5, 1.0, 1.5, ...: exact in fp32. */
inline std::vector<float> ramp(std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i + 1) * 0.5f;
  return values;
}

/** Two groups: "first" with weight 3 x 4 and bias 4, "second" with weight 5 x 2; published. */
struct TwoGroups {
  explicit TwoGroups(const fsdp::Context &context, const fsdp::ModelOptions &options = {}) : model(context, options) {
    first = model.create_group("first", {fsdp::Param("first.weight", {3, 4}), fsdp::Param("first.bias", {4})});
    second = model.create_group("second", {fsdp::Param("second.weight", {5, 2})});
    model.seal();
    first.load_param("first.weight", ramp(12));
    first.load_param("first.bias", ramp(4));
    second.load_param(0, ramp(10));
    model.publish_weights();
  }

  /** Every gradient is the weight itself. */
  void step(double lr) {
    for (fsdp::Group group : {second, first}) {
      fsdp::Weights weights = group.unshard(fsdp::Phase::backward);
      for (std::size_t p = 0; p < weights.size(); ++p) {
        const fsdp::span<const float> w = weights[p];
        const fsdp::span<float> grad = group.acquire_grad(p);
        for (std::size_t i = 0; i < w.size(); ++i) grad[i] = w[i];
      }
      weights.reshard();
      group.reduce_grad(FSDP_LAST);
    }
    model.finish_grads();
    model.step_adamw(lr);
  }

  fsdp::Model model;
  fsdp::Group first, second;
};

/** AdamW as its paper defines it, in doubles, on one element whose gradient is itself. */
inline double adamw(double w, int steps, double lr) {
  double m = 0, v = 0;
  for (int step = 1; step <= steps; ++step) {
    const double g = w, c1 = 1 - std::pow(0.9, step), c2 = 1 - std::pow(0.999, step);
    m = 0.9 * m + 0.1 * g;
    v = 0.999 * v + 0.001 * g * g;
    w -= lr * (m / c1) / (std::sqrt(v / c2) + 1e-8);
  }
  return w;
}

/** The status of what a call throws; ok if it does not. */
template <typename Call>
fsdp::Status status_of(Call call) {
  try {
    call();
  } catch (const fsdp::Error &error) {
    return error.status();
  }
  return fsdp::Status::ok;
}

#endif
