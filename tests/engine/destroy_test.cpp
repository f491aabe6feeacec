// SPDX-License-Identifier: Apache-2.0
// Handles are destroyed in any order, from any thread, in any state: at once, without a crash, and without leaving a
// peer in a wait.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <memory>
#include <string>
#include <thread>

#include "owner.h"

using namespace harness;

namespace {

enum class State {
  declared,
  sealed,
  published,
  held,       // in the middle of a forward pass, with prefetches
  lent,       // gradients acquired, not reduced
  unjoined,   // rank 0 has reduces in flight that its peer never joins
  gathering,  // rank 0 gathers what was published just now
  window      // in the update window
};
constexpr State states[] = {State::declared, State::sealed,   State::published, State::held,
                            State::lent,     State::unjoined, State::gathering, State::window};
constexpr const char *state_names[] = {"Declared", "Sealed",   "Published", "Held",
                                       "Lent",     "Unjoined", "Gathering", "Window"};

std::vector<Order> all_orders() {
  Order order{Handle::context, Handle::model, Handle::mesh};
  std::vector<Order> orders;
  do orders.push_back(order);
  while (std::next_permutation(order.begin(), order.end()));
  return orders;
}

void enter(State state, Rank &rank) {
  if (state == State::declared || state == State::sealed) return;
  rank.load();
  clean_step(rank, 0);
  switch (state) {
    case State::held:
      FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
      break;
    case State::lent: {
      forward(rank, nullptr);
      fsdp_tensor grad = FSDP_TENSOR_INIT;
      int32_t accumulate = 0;
      FSDP(fsdp_acquire_grad(rank.groups[3], 0, 0, nullptr, &grad, &accumulate));
      FSDP(fsdp_acquire_grad(rank.groups[2], 1, 0, nullptr, &grad, &accumulate));
      break;
    }
    case State::unjoined:
      forward(rank, nullptr);
      if (rank.rank == 0)
        for (const size_t g : {3, 2}) backward_group(rank, g, 1, 0, nullptr);
      break;
    case State::gathering:
    case State::window:
      finish_step(rank, 1);
      if (state == State::window) break;
      update(rank);
      if (rank.rank) break;
      FSDP(fsdp_prefetch(rank.groups[0], FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_prefetch(rank.groups[1], FSDP_FORWARD, 0, nullptr));
      break;
    default: break;
  }
}

// Trains on until a call fails.
void go_on(State state, Rank &rank) {
  if (state == State::declared) FSDP(fsdp_seal_model(rank.model));
  if (state == State::declared || state == State::sealed)
    rank.load();
  else
    FSDP(fsdp_discard_step(rank.model, nullptr));
  for (uint32_t step = 0;; ++step) clean_step(rank, step);
}

using Place = std::tuple<uint32_t, State>;
class Destroy : public testing::TestWithParam<Place> {};

std::string place_name(const testing::TestParamInfo<Place> &info) {
  return std::string(state_names[static_cast<int>(std::get<1>(info.param))]) + std::to_string(std::get<0>(info.param));
}
class DestroyOne : public Destroy {};
INSTANTIATE_TEST_SUITE_P(All, DestroyOne, testing::Combine(testing::Values(2u, 4u), testing::ValuesIn(states)),
                         place_name);
INSTANTIATE_TEST_SUITE_P(All, Destroy, testing::Combine(testing::Values(1u, 2u, 4u), testing::ValuesIn(states)),
                         place_name);

// Every rank destroys everything, in an order of its own.
TEST_P(Destroy, InAnyOrderOnAllRanks) {
  const auto [ranks, state] = GetParam();
  const auto orders = all_orders();
  for (size_t i = 0; i < orders.size(); ++i) {
    const Scenario scenario =
        scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, i % 2 ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED);
    std::vector<fsdp_context *> contexts(ranks);
    ASSERT_EQ(fsdp_create_local_contexts(ranks, &scenario.context, contexts.data()), FSDP_OK);
    std::vector<std::string> errors(ranks);
    std::vector<std::thread> threads;
    std::barrier together(ranks);
    for (uint32_t r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] {
        try {
          Owner owner(contexts[r], scenario, state != State::declared);
          enter(state, owner.rank());
          together.arrive_and_wait();
          const double slowest = owner.destroy_all(orders[(i + r) % orders.size()], (i + r) % 3 == 0);
          if (slowest >= 5) errors[r] = "a destroy took " + std::to_string(slowest) + " s";
        } catch (const std::exception &error) {
          errors[r] = error.what();
          together.arrive_and_drop();
        }
      });
    for (auto &thread : threads) thread.join();
    for (const std::string &error : errors) EXPECT_EQ(error, "") << "order " << i;
  }
}

// One rank destroys everything; the others go on until they are told.
TEST_P(DestroyOne, WhileTheOthersGoOn) {
  const auto [ranks, state] = GetParam();
  const auto orders = all_orders();
  std::atomic<double> longest{0};
  for (size_t i = 0; i < orders.size(); ++i) {
    const Scenario scenario =
        scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, i % 2 ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED);
    std::vector<fsdp_context *> contexts(ranks);
    ASSERT_EQ(fsdp_create_local_contexts(ranks, &scenario.context, contexts.data()), FSDP_OK);
    std::vector<std::string> errors(ranks);
    std::atomic<double> destroyed{0};
    std::barrier together(ranks);
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] {
        try {
          Owner owner(contexts[r], scenario, state != State::declared);
          enter(state, owner.rank());
          together.arrive_and_wait();
          if (r == 0) {
            if (i % 3 == 0) pause_ms(10);  // the others are in their waits already
            const double slowest = owner.destroy_all(orders[i], i % 2);
            destroyed = now();
            if (slowest >= 5) errors[r] = "a destroy took " + std::to_string(slowest) + " s";
            return;
          }
          try {
            go_on(state, owner.rank());
          } catch (const Failure &failure) {
            // First the reduces of the destroyed model fail the step, then the context ends.
            Failure last = failure;
            while (last.status == FSDP_INVALID_STATE || last.status == FSDP_MISMATCH) try {
                FSDP(fsdp_discard_step(owner.rank().model, nullptr));
                clean_step(owner.rank(), 0);
              } catch (const Failure &next) {
                last = next;
              }
            const double told = now();
            if (last.status != FSDP_PEER_FAILED || last.rank != 0) errors[r] = last.what();
            while (destroyed == 0 && now() - told < 5) pause_ms(1);
            longest = std::max(longest.load(), told - destroyed);
            if (told - destroyed >= 3) errors[r] = "told after " + std::to_string(told - destroyed) + " s";
            REQUIRE(fsdp_close_context(owner.context()) == FSDP_PEER_FAILED);
          }
        } catch (const std::exception &error) {
          errors[r] = error.what();
          if (errors[r].empty()) errors[r] = "?";
        }
      });
    for (auto &thread : threads) thread.join();
    for (const std::string &error : errors) EXPECT_EQ(error, "") << "order " << i;
  }
  printf("told at most %.1f ms after the destroy\n", 1e3 * longest);
}

// Every rank destroys its model in the middle of a step and makes a new one in the same context.
TEST_P(Destroy, AModelAndMakeAnotherOne) {
  const auto [ranks, state] = GetParam();
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
  Scenario clean = scenario;
  clean.context.timeout_ms = 0;
  const Outcome expected = reference(clean);
  std::barrier together(ranks);
  run_threads(scenario, [&, state = state](uint32_t, fsdp_context *context) {
    try {
      Rank first(context, scenario, state != State::declared);
      enter(state, first);
    } catch (...) {
      together.arrive_and_drop();
      throw;
    }
    together.arrive_and_wait();
    try {
      Rank second(context, clean);
      Outcome outcome;
      train(second, outcome);
      REQUIRE(same_bits(outcome.weights, expected.weights));
      FSDP(fsdp_close_context(context));
    } catch (const Failure &failure) {
      // A gather that waits for what a peer has not published yet can only end with its context.
      if (state != State::gathering || failure.message.find("rank 0") == std::string::npos ||
          failure.message.find("was destroyed with work in flight") == std::string::npos)
        throw;
    }
  });
}

}  // namespace
