// SPDX-License-Identifier: Apache-2.0
// Steps that a rank spoils: none hangs, the error says which rank and what, and the weights do not change.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>

#include "harness.h"

using namespace harness;

namespace {

fsdp_error error_of(fsdp_context *context) {
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(context, &error);
  return error;
}

// Trains with a spoilt step before each clean one; the bits must be those of undisturbed training. The spoilt step ends
// within `limit` seconds on every rank.
void expect_no_trace(const Scenario &scenario, const std::function<void(Rank &)> &spoil, double limit = 5.0) {
  const auto expected = reference(scenario).weights;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    {
      Rank rank(context, scenario);
      rank.load();
      for (uint32_t step = 0; step < scenario.steps; ++step) {
        const double start = now();
        spoil(rank);
        FSDP(fsdp_discard_step(rank.model, nullptr));
        REQUIRE(now() - start < limit);
        clean_step(rank, step);
      }
      REQUIRE(rank.read_all() == expected);
    }
    FSDP(fsdp_close_context(context));
  });
}

class SpoiltStep : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  Scenario scenario() const { return scenario_of(std::get<0>(GetParam()), 3, std::get<1>(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(All, SpoiltStep, testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(1, 2)));

// Rank 1 has an exception in the middle of its forward pass; the others go on to the end of the step.
TEST_P(SpoiltStep, OneRankDiscardsInForwardWhileTheOthersFinish) {
  expect_no_trace(scenario(), [](Rank &rank) {
    if (rank.rank == 1) {
      FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return;
    }
    forward(rank, nullptr);
    backward(rank, 7, 0, nullptr);
    const fsdp_status status = fsdp_finish_grads(rank.model, 0.5, 0, nullptr);
    require_error(status, FSDP_INVALID_STATE, {"rank 1 called fsdp_discard_step", "call fsdp_discard_step"});
    REQUIRE(std::string(error_of(rank.context).message).find("scale") == std::string::npos);
    REQUIRE(!error_of(rank.context).context_failed);
    // Until then nothing of the step goes on.
    const fsdp_status next = fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr);
    require_error(next, FSDP_INVALID_STATE, {"fsdp_discard_step"});
  });
}

// ... or in the middle of its backward pass, with gradients lent and reduces of its own in flight.
TEST_P(SpoiltStep, OneRankDiscardsInBackwardWhileTheOthersFinish) {
  expect_no_trace(scenario(), [](Rank &rank) {
    forward(rank, nullptr);
    if (rank.rank == 2) {
      backward_group(rank, 3, 7, 0, nullptr);
      FSDP(fsdp_unshard(rank.groups[2], FSDP_BACKWARD, 0, nullptr));
      fsdp_tensor grad = FSDP_TENSOR_INIT;
      int32_t accumulate = 0;
      FSDP(fsdp_acquire_grad(rank.groups[2], 0, 0, nullptr, &grad, &accumulate));
      return;
    }
    backward(rank, 7, 0, nullptr);
    require_error(fsdp_finish_grads(rank.model, 1.0, 0, nullptr), FSDP_INVALID_STATE,
                  {"rank 2 called fsdp_discard_step", "call fsdp_discard_step"});
  });
}

TEST_P(SpoiltStep, OneRankForgetsTheLastReduce) {
  expect_no_trace(scenario(), [](Rank &rank) {
    forward(rank, nullptr);
    for (size_t g = rank.groups.size(); g-- > (rank.rank == 1 ? 1u : 0u);) backward_group(rank, g, 7, 0, nullptr);
    require_error(fsdp_finish_grads(rank.model, 1.0, 0, nullptr), FSDP_INVALID_STATE,
                  {"rank 1", "'embed'", "fsdp_reduce_grad", "fsdp_discard_step"});
    REQUIRE(!error_of(rank.context).context_failed);
  });
}

TEST_P(SpoiltStep, OneRankStillHoldsAGroup) {
  expect_no_trace(scenario(), [](Rank &rank) {
    forward(rank, nullptr);
    backward(rank, 7, 0, nullptr);
    if (rank.rank == 0) FSDP(fsdp_unshard(rank.groups[2], FSDP_FORWARD, 0, nullptr));
    require_error(fsdp_finish_grads(rank.model, 1.0, 0, nullptr), FSDP_INVALID_STATE,
                  {"rank 0", "'layer.1'", "fsdp_reshard", "fsdp_discard_step"});
  });
}

// The reduces of the ranks differ, and nothing else shows it before: every rank gets an error with both calls. No main
// grads are given out, and the contexts have failed.
void expect_lost_job(const Scenario &scenario, const std::function<void(Rank &)> &body,
                     const std::vector<std::string> &parts) {
  std::atomic<double> last_arrival{0}, last_error{0};
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    forward(rank, nullptr);
    const double start = now();
    fsdp_status status = FSDP_OK;
    try {
      body(rank);
      status = fsdp_finish_grads(rank.model, 1.0, 0, nullptr);
    } catch (const Failure &failure) {
      status = failure.status;
    }
    last_error = std::max(last_error.load(), now() - start);
    require_error(status, FSDP_MISMATCH, parts);
    REQUIRE(error_of(context).context_failed);
    REQUIRE(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr) == FSDP_MISMATCH);
    REQUIRE(now() - start < 5.0);
  });
  printf("all ranks knew after %.1f ms\n", 1e3 * last_error);
}

TEST_P(SpoiltStep, OneRankForgetsAReduceInTheMiddle) {
  expect_lost_job(scenario(),
                  [](Rank &rank) {
                    for (size_t g = rank.groups.size(); g-- > 0;)
                      if (rank.rank != 1 || g != 2) backward_group(rank, g, 7, 0, nullptr);
                  },
                  {"rank 1", "'layer.1'", "'layer.0'"});
}

TEST_P(SpoiltStep, RanksReduceInDifferentOrder) {
  expect_lost_job(scenario(),
                  [](Rank &rank) {
                    std::vector<size_t> order{3, 2, 1, 0};
                    if (rank.rank == 2) std::swap(order[1], order[2]);
                    for (const size_t g : order) backward_group(rank, g, 7, 0, nullptr);
                  },
                  {"rank 2", "'layer.0'", "'layer.1'"});
}

}  // namespace
