// SPDX-License-Identifier: Apache-2.0
// One rank destroys handles while a call waits, before it destroys the objects that were made from them. Ranks that
// wait get an error.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#include "owner.h"

using namespace harness;

namespace {

// A call waits for a peer while another thread destroys the context of the same rank.
struct Waiting {
  std::string name;
  bool seal;
  void (*prepare)(Rank &);
  fsdp_status (*call)(Rank &);
};

std::vector<float> some_data(Rank &rank) { return std::vector<float>(rank.def(0).params[0].count()); }

void finish(Rank &rank) {
  rank.load();
  finish_step(rank, 0);
}

const Waiting waitings[] = {
    {"Seal", false, [](Rank &) {}, [](Rank &rank) { return fsdp_seal_model(rank.model); }},
    {"Publish", true, [](Rank &) {}, [](Rank &rank) { return fsdp_publish_weights(rank.model, nullptr); }},
    {"Load", true, [](Rank &) {},
     [](Rank &rank) {
       const auto data = some_data(rank);
       return fsdp_load_param(rank.groups[0], 0, data.data(), FSDP_FLOAT32, data.size(), 1, 0);
     }},
    {"Read", true, [](Rank &rank) { rank.load(); },
     [](Rank &rank) {
       auto data = some_data(rank);
       return fsdp_read_param(rank.groups[0], 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0);
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
       return fsdp_acquire_grad(rank.groups[1], 0, 0, nullptr, &grad, &accumulate);
     }},
    {"Finish", true,
     [](Rank &rank) {
       rank.load();
       forward(rank, nullptr);
       if (rank.rank) backward_group(rank, 3, 0, 0, nullptr);
     },
     [](Rank &rank) { return fsdp_finish_grads(rank.model, 1.0, 0, nullptr); }},
    {"Norm", true, finish,
     [](Rank &rank) {
       double norm = 0;
       return fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm);
     }},
    {"Discard", true, finish, [](Rank &rank) { return fsdp_discard_step(rank.model, nullptr); }},
    {"Values", true, finish,
     [](Rank &rank) {
       double value = 1;
       return fsdp_all_reduce_values(rank.context, nullptr, &value, 1, FSDP_VALUE_SUM);
     }},
    {"Close", true, [](Rank &) {}, [](Rank &rank) { return fsdp_close_context(rank.context); }},
};

// Returns whether another thread is inside the context. It makes a call that would do nothing there.
bool is_busy(fsdp_context *context) {
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  options.shard_size = 999;
  fsdp_mesh *mesh = nullptr;
  return fsdp_create_mesh(context, &options, &mesh) == FSDP_BUSY;
}

class DestroyDuring : public testing::TestWithParam<Waiting> {};
INSTANTIATE_TEST_SUITE_P(All, DestroyDuring, testing::ValuesIn(waitings),
                         [](const auto &info) { return info.param.name; });

TEST_P(DestroyDuring, ACallThatWaits) {
  const Waiting &waiting = GetParam();
  for (const Order &order :
       {Order{Handle::context, Handle::model, Handle::mesh}, Order{Handle::mesh, Handle::model, Handle::context}}) {
    const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    std::vector<fsdp_context *> contexts(2);
    ASSERT_EQ(fsdp_create_local_contexts(2, &scenario.context, contexts.data()), FSDP_OK);
    std::barrier together(2);
    std::atomic<double> destroyed{0}, returned{0};
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
        const fsdp_status status = fsdp_all_reduce_values(owner->context(), nullptr, &value, 1, FSDP_VALUE_SUM);
        fsdp_error error = FSDP_ERROR_INIT;
        fsdp_get_last_error(nullptr, &error);
        if (status != FSDP_PEER_FAILED || error.rank != 1 || now() - start >= 3) errors[r] = error.message;
        return;
      }
      std::thread destroyer([&] {
        for (const double end = now() + 30; returned == 0 && now() < end && !is_busy(owner->context());) pause_ms(1);
        pause_ms(30);
        if (returned != 0) errors[0] = "the call did not wait";
        for (const Handle handle : order) {
          const double start = now();
          owner->destroy(handle);
          if (now() - start >= 3) errors[1] += "a destroy took " + std::to_string(now() - start) + " s; ";
        }
        destroyed = now();
      });
      fsdp_status status = FSDP_BUSY;  // also while the other thread asks
      while (status == FSDP_BUSY) status = waiting.call(owner->rank());
      returned = now();
      const std::string message = last_message();
      destroyer.join();
      if (status != FSDP_INVALID_HANDLE || message.find("has been destroyed") == std::string::npos)
        errors[1] += std::string(fsdp_get_status_name(status)) + ", last message: " + message;
      if (returned - destroyed >= 3)
        errors[1] += "the call returned " + std::to_string(returned - destroyed) + " s later";
    };
    std::thread peer([&] { body(0); });
    body(1);
    peer.join();
    EXPECT_EQ(errors[0], "");
    EXPECT_EQ(errors[1], "");
  }
}

// One rank destroys a model while its context lives: no call waits longer than timeout_ms, and the error names that
// rank.
TEST(DestroyModel, OnOneRankOnlyIsATimeoutOfTheOthers) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  scenario.context.timeout_ms = 1500;
  std::barrier together(3);
  std::atomic<double> first{
      std::numeric_limits<double>::max()};  // the rank that began to wait first times out for both
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    auto rank = std::make_unique<Rank>(context, scenario);
    rank->load();
    forward(*rank, nullptr);
    if (r == 1) {
      rank.reset();
    } else {
      const double start = now();
      for (double earliest = first; start < earliest && !first.compare_exchange_weak(earliest, start);) {
      }
      backward(*rank, 0, 0, nullptr);
      const fsdp_status status = fsdp_finish_grads(rank->model, 1.0, 0, nullptr);
      fsdp_error error = FSDP_ERROR_INIT;
      fsdp_get_last_error(context, &error);
      if (status != FSDP_TIMEOUT || error.rank != 1) throw std::runtime_error(error.message);
      REQUIRE(now() - first > 1.4 && now() - start < 10);
    }
    together.arrive_and_wait();
  });
}

// A rank whose context failed takes part in no meeting: the others get the failure, whatever that rank does next.
TEST(FailedContext, OfAnInterruptedRankIsKnownToTheOthers) {
  static thread_local bool interrupted = false;
  static std::atomic<bool> gives_up;
  gives_up = false;
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  scenario.context.interrupted = [](void *) {
    if (interrupted) gives_up = true;
    return static_cast<int32_t>(interrupted);
  };
  std::barrier together(3);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    interrupted = r == 1;
    for (const double end = now() + 60; r == 2 && !gives_up && now() < end;) pause_ms(1);  // rank 1 waits for it
    const double start = now();
    double value = 1;
    const fsdp_status status = r == 2 ? fsdp_begin_update(rank.model, nullptr)
                                      : fsdp_all_reduce_values(context, nullptr, &value, 1, FSDP_VALUE_SUM);
    fsdp_error error = FSDP_ERROR_INIT;
    fsdp_get_last_error(context, &error);
    together.arrive_and_wait();
    const bool right = r == 1 ? status == FSDP_INTERRUPTED : status == FSDP_PEER_FAILED && error.rank == 1;
    if (!right) throw std::runtime_error(std::string(fsdp_get_status_name(status)) + ": " + error.message);
    REQUIRE(now() - start < 10);
  });
}

// Models that were made from a mesh do not need the mesh any longer.
TEST(DestroyMesh, BeforeItsModelsAreDeclared) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
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
