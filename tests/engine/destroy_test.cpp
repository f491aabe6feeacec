// SPDX-License-Identifier: Apache-2.0
// Handles are destroyed in any order, from any thread, in any state: at once, without a crash, and without leaving a
// peer in a wait.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "harness.h"

using namespace harness;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

#define REQUIRE(condition) \
  if (!(condition)) throw std::runtime_error("not true: " #condition)

enum class State {
  declared,
  sealed,
  published,
  held,       // in the middle of a forward pass, with prefetches
  lent,       // gradients acquired, not reduced
  unjoined,   // rank 0 has reduces in flight that nobody joins
  gathering,  // rank 0 gathers what was published just now
  window      // in the update window
};
constexpr State states[] = {State::declared, State::sealed,   State::published, State::held,
                            State::lent,     State::unjoined, State::gathering, State::window};
constexpr const char *state_names[] = {"Declared", "Sealed",   "Published", "Held",
                                       "Lent",     "Unjoined", "Gathering", "Window"};

enum class Handle { context, model, mesh };
using Order = std::vector<Handle>;

std::vector<Order> all_orders() {
  Order order{Handle::context, Handle::model, Handle::mesh};
  std::vector<Order> orders;
  do orders.push_back(order);
  while (std::next_permutation(order.begin(), order.end()));
  return orders;
}

Scenario scenario_of(uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario scenario;
  scenario.ranks = ranks;
  scenario.context.timeout_ms = 20'000;
  scenario.model.unshard_mode = mode;
  scenario.groups = odd_groups();
  return scenario;
}

// Everything of one rank, to be destroyed piece by piece.
class Owner {
 public:
  Owner(fsdp_context *context, const Scenario &given, bool seal) : context_(context), scenario_(given) {
    FSDP(fsdp_create_mesh(context, nullptr, &mesh_));
    scenario_.model.mesh = mesh_;
    rank_ = std::make_unique<Rank>(context, scenario_, seal);
  }
  ~Owner() {
    for (const Handle handle : {Handle::mesh, Handle::model, Handle::context}) destroy(handle);
    rank_->model = nullptr;
  }
  Rank &rank() { return *rank_; }
  fsdp_context *context() const { return context_; }

  void destroy(Handle handle) {
    if (handle == Handle::context) fsdp_destroy_context(std::exchange(context_, nullptr));
    if (handle == Handle::mesh) fsdp_destroy_mesh(std::exchange(mesh_, nullptr));
    // The pointer stays as it is: another thread may be about to use it in a call.
    if (handle == Handle::model && !std::exchange(model_destroyed_, true)) fsdp_destroy_model(rank_->model);
  }
  // The seconds it took.
  double destroy_all(const Order &order, bool other_thread) {
    double slowest = 0;
    for (const Handle handle : order) {
      const double start = now();
      if (other_thread)
        std::thread([&] { destroy(handle); }).join();
      else
        destroy(handle);
      slowest = std::max(slowest, now() - start);
    }
    return slowest;
  }

 private:
  fsdp_context *context_;
  Scenario scenario_;
  fsdp_mesh *mesh_ = nullptr;
  std::unique_ptr<Rank> rank_;
  bool model_destroyed_ = false;
};

void clean_step(Rank &rank, uint32_t step) {
  forward(rank, nullptr);
  backward(rank, step, 0, nullptr);
  FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
  FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
}

void enter(State state, Rank &rank) {
  if (state == State::declared || state == State::sealed) return;
  rank.load();
  clean_step(rank, 0);
  switch (state) {
    case State::held:
      FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, nullptr));
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, nullptr));
      break;
    case State::lent: {
      forward(rank, nullptr);
      fsdp_tensor grad = FSDP_TENSOR_INIT;
      int32_t accumulate = 0;
      FSDP(fsdp_acquire_grad(rank.groups[3], 0, nullptr, &grad, &accumulate));
      FSDP(fsdp_acquire_grad(rank.groups[2], 1, nullptr, &grad, &accumulate));
      break;
    }
    case State::unjoined:
      forward(rank, nullptr);
      if (rank.rank == 0)
        for (const size_t g : {3, 2}) backward_group(rank, g, 1, 0, nullptr);
      break;
    case State::gathering:
    case State::window:
      forward(rank, nullptr);
      backward(rank, 1, 0, nullptr);
      FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
      if (state == State::window) break;
      FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
      if (rank.rank) break;
      FSDP(fsdp_prefetch(rank.groups[0], FSDP_FORWARD, nullptr));
      FSDP(fsdp_prefetch(rank.groups[1], FSDP_FORWARD, nullptr));
      break;
    default: break;
  }
}

// Goes on as if nothing had happened, until a call fails.
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
    const Scenario scenario = scenario_of(ranks, i % 2 ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED);
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
          if (slowest >= 1) errors[r] = "a destroy took " + std::to_string(slowest) + " s";
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
    const Scenario scenario = scenario_of(ranks, i % 2 ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED);
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
            if (slowest >= 1) errors[r] = "a destroy took " + std::to_string(slowest) + " s";
            return;
          }
          try {
            go_on(state, owner.rank());
          } catch (const Failure &failure) {
            // Reduces of a model that is gone end the step first, the context's end comes after.
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
            if (told - destroyed >= 1) errors[r] = "told after " + std::to_string(told - destroyed) + " s";
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

// Every rank gives its model back in the middle of things and makes a new one on the same context.
TEST_P(Destroy, AModelAndMakeAnotherOne) {
  const auto [ranks, state] = GetParam();
  const Scenario scenario = scenario_of(ranks);
  Scenario clean = scenario;
  clean.context.timeout_ms = 0;
  const auto expected = train_threads(clean)[0].weights;
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
      REQUIRE(same_bits(outcome.weights, expected));
      FSDP(fsdp_close_context(context));
    } catch (const Failure &failure) {
      // A gather that waits for what a peer has not published yet can only end with its context.
      if (state != State::gathering || failure.message.find("rank 0") == std::string::npos ||
          failure.message.find("was destroyed with work in flight") == std::string::npos)
        throw;
    }
  });
}

// A call that waits for a peer, and the same rank's context destroyed by another thread.
struct Waiting {
  std::string name;
  bool seal;
  void (*prepare)(Rank &);
  fsdp_status (*call)(Rank &);
};

std::vector<float> some_data(Rank &rank) { return std::vector<float>(rank.def(0).params[0].count()); }

void finish(Rank &rank) {
  rank.load();
  forward(rank, nullptr);
  backward(rank, 0, 0, nullptr);
  FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
}

const Waiting waitings[] = {
    {"Seal", false, [](Rank &) {}, [](Rank &rank) { return fsdp_seal_model(rank.model); }},
    {"Publish", true, [](Rank &) {}, [](Rank &rank) { return fsdp_publish_weights(rank.model, nullptr); }},
    {"Load", true, [](Rank &) {},
     [](Rank &rank) {
       const auto data = some_data(rank);
       return fsdp_load_param(rank.groups[0], 0, data.data(), FSDP_FLOAT32, data.size(), 1);
     }},
    {"Read", true, [](Rank &rank) { rank.load(); },
     [](Rank &rank) {
       auto data = some_data(rank);
       return fsdp_read_param(rank.groups[0], 0, data.data(), FSDP_FLOAT32, data.size());
     }},
    {"Step", true, finish, [](Rank &rank) { return fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr); }},
    {"Reduce", true,
     [](Rank &rank) {
       rank.load();
       forward(rank, nullptr);
       if (rank.rank)
         for (const size_t g : {3, 2}) backward_group(rank, g, 0, 0, nullptr);
     },
     [](Rank &rank) {
       fsdp_tensor grad = FSDP_TENSOR_INIT;
       int32_t accumulate = 0;
       return fsdp_acquire_grad(rank.groups[1], 0, nullptr, &grad, &accumulate);
     }},
    {"Finish", true,
     [](Rank &rank) {
       rank.load();
       forward(rank, nullptr);
       if (rank.rank) backward_group(rank, 3, 0, 0, nullptr);
     },
     [](Rank &rank) { return fsdp_finish_grads(rank.model, 1.0, nullptr); }},
    {"Norm", true, finish,
     [](Rank &rank) {
       double norm = 0;
       return fsdp_get_grad_norm(rank.model, nullptr, &norm);
     }},
    {"Discard", true, finish, [](Rank &rank) { return fsdp_discard_step(rank.model, nullptr); }},
    {"Values", true, finish,
     [](Rank &rank) {
       double value = 1;
       return fsdp_all_reduce_values(rank.context, &value, 1, FSDP_VALUE_SUM);
     }},
    {"Close", true, [](Rank &) {}, [](Rank &rank) { return fsdp_close_context(rank.context); }},
};

class DestroyDuring : public testing::TestWithParam<Waiting> {};
INSTANTIATE_TEST_SUITE_P(All, DestroyDuring, testing::ValuesIn(waitings),
                         [](const auto &info) { return info.param.name; });

TEST_P(DestroyDuring, ACallThatWaits) {
  const Waiting &waiting = GetParam();
  for (const Order &order :
       {Order{Handle::context, Handle::model, Handle::mesh}, Order{Handle::mesh, Handle::model, Handle::context}}) {
    const Scenario scenario = scenario_of(2);
    std::vector<fsdp_context *> contexts(2);
    ASSERT_EQ(fsdp_create_local_contexts(2, &scenario.context, contexts.data()), FSDP_OK);
    std::barrier together(2);
    std::atomic<double> called{0}, destroyed{0}, returned{0};
    std::string errors[2];
    const auto body = [&](uint32_t r) {
      std::unique_ptr<Owner> owner;
      try {
        owner = std::make_unique<Owner>(contexts[r], scenario, waiting.seal);
        waiting.prepare(owner->rank());
      } catch (const std::exception &error) {
        errors[r] = error.what();
      }
      together.arrive_and_wait();
      if (!errors[r].empty()) return;
      if (r == 0) {
        while (destroyed == 0) pause_ms(1);
        const double start = now();
        double value = 1;
        const fsdp_status status = fsdp_all_reduce_values(owner->context(), &value, 1, FSDP_VALUE_SUM);
        fsdp_error error = FSDP_ERROR_INIT;
        fsdp_get_last_error(nullptr, &error);
        if (status != FSDP_PEER_FAILED || error.rank != 1 || now() - start >= 1) errors[r] = error.message;
        return;
      }
      std::thread destroyer([&] {
        while (called == 0) pause_ms(1);
        pause_ms(30);
        if (returned != 0) errors[0] = "the call did not wait";
        for (const Handle handle : order) {
          const double start = now();
          owner->destroy(handle);
          if (now() - start >= 1) errors[1] += "a destroy took " + std::to_string(now() - start) + " s; ";
        }
        destroyed = now();
      });
      called = now();
      const fsdp_status status = waiting.call(owner->rank());
      returned = now();
      const std::string message = last_message();
      destroyer.join();
      if (status != FSDP_INVALID_HANDLE || message.find("has been destroyed") == std::string::npos)
        errors[1] += std::string(fsdp_get_status_name(status)) + ", last message: " + message;
      if (returned - destroyed >= 1)
        errors[1] += "the call returned " + std::to_string(returned - destroyed) + " s later";
    };
    std::thread peer([&] { body(0); });
    body(1);
    peer.join();
    EXPECT_EQ(errors[0], "");
    EXPECT_EQ(errors[1], "");
  }
}

// A model that is gone on one rank while its context lives: no call waits longer than timeout_ms, and the error names
// it.
TEST(DestroyModel, OnOneRankOnlyIsATimeoutOfTheOthers) {
  Scenario scenario = scenario_of(3);
  scenario.context.timeout_ms = 400;
  std::barrier together(3);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    auto rank = std::make_unique<Rank>(context, scenario);
    rank->load();
    forward(*rank, nullptr);
    if (r == 1) {
      rank.reset();
    } else {
      const double start = now();
      backward(*rank, 0, 0, nullptr);
      const fsdp_status status = fsdp_finish_grads(rank->model, 1.0, nullptr);
      fsdp_error error = FSDP_ERROR_INIT;
      fsdp_get_last_error(context, &error);
      if (status != FSDP_TIMEOUT || error.rank != 1) throw std::runtime_error(error.message);
      REQUIRE(now() - start > 0.35 && now() - start < 2);
    }
    together.arrive_and_wait();
  });
}

// A context that failed on one rank comes to no meeting: the others are told, whatever that rank does next.
TEST(FailedContext, OfAnInterruptedRankIsKnownToTheOthers) {
  static thread_local bool interrupted = false;
  Scenario scenario = scenario_of(3);
  scenario.context.interrupted = [](void *) { return static_cast<int32_t>(interrupted); };
  std::barrier together(3);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    interrupted = r == 1;
    if (r == 2) pause_ms(100);  // so that rank 1 waits
    const double start = now();
    double value = 1;
    const fsdp_status status =
        r == 2 ? fsdp_begin_update(rank.model, nullptr) : fsdp_all_reduce_values(context, &value, 1, FSDP_VALUE_SUM);
    fsdp_error error = FSDP_ERROR_INIT;
    fsdp_get_last_error(context, &error);
    together.arrive_and_wait();
    const bool right = r == 1 ? status == FSDP_INTERRUPTED : status == FSDP_PEER_FAILED && error.rank == 1;
    if (!right) throw std::runtime_error(std::string(fsdp_get_status_name(status)) + ": " + error.message);
    REQUIRE(now() - start < 1);
  });
}

// Nothing of a mesh is needed by models made from it.
TEST(DestroyMesh, BeforeItsModelsAreDeclared) {
  const Scenario scenario = scenario_of(2);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    fsdp_mesh *mesh = nullptr;
    FSDP(fsdp_create_mesh(context, nullptr, &mesh));
    Scenario mine = scenario;
    mine.model.mesh = mesh;
    Rank rank(context, mine, false);
    fsdp_destroy_mesh(mesh);
    FSDP(fsdp_seal_model(rank.model));
    rank.load();
    clean_step(rank, 0);
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
