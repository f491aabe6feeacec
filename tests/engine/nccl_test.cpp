// SPDX-License-Identifier: Apache-2.0
// Training over NCCL's look-alike, between threads that each have a simulated GPU. Tested are the reference's bits, and
// steps that ranks discard in the middle. This shows nothing about NCCL's speed or its sums in fp32.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <mutex>

#include "device.h"
#include "element.h"
#include "harness.h"
#include "simulated_cuda/simulated.h"
#include "simulated_nccl/simulated_nccl.h"

using namespace harness;

namespace {

Scenario nccl_scenario(fsdp_strategy strategy, uint32_t ranks) {
  Scenario setup = scenario_of(strategy, ranks, 0);
  setup.microbatches = 2;
  setup.steps = 3;
  setup.clip = 3;
  setup.context.device = FSDP_DEVICE_CUDA;
  setup.context.device_transport = FSDP_TRANSPORT_NCCL;
  return setup;
}

Scenario with_replicas(Scenario setup, fsdp_outer_strategy outer) {
  setup.mesh.replicate_size = setup.mesh.shard_size = setup.ranks / 2;
  setup.model.outer_strategy = outer;
  return setup;
}

// Gradients sent in 16 bits are added by the library, with the same bits over every transport. In fp32 the look-alike
// adds in rank order, as the reference does, so all bits are equal for any number of ranks. (NCCL itself has its own
// order, in which only sums of two addends are determined.)
void expect_trains(Scenario setup, const std::string &what) {
  setup.eval = setup.recompute = true;
  const auto outcomes = train_threads(setup);
  for (size_t r = 0; r < outcomes.size(); ++r) ASSERT_EQ(outcomes[r].error, "") << what << ", rank " << r;
  EXPECT_EQ(difference(setup, outcomes), "") << what;
}

TEST(Nccl, AllStrategiesMatchTheReference) {
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {2u, 3u, 4u})
      expect_trains(nccl_scenario(strategy, ranks),
                    "strategy " + std::to_string(strategy) + ", ranks " + std::to_string(ranks));
}

TEST(Nccl, ReplicasMatchTheReference) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM})
      expect_trains(with_replicas(nccl_scenario(strategy, 4), outer),
                    "strategy " + std::to_string(strategy) + ", outer " + std::to_string(outer));
}

TEST(Nccl, ForcedCommunicationOfOneRankMatchesTheReference) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
    Scenario setup = nccl_scenario(strategy, 1);
    setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
    expect_trains(setup, "strategy " + std::to_string(strategy));
  }
}

// Gradients of 16 bits, gradients that are rounded to 16 bits (also if the sums stay in the gradient itself), and
// gradients that are not rounded.
TEST(Nccl, LowPrecisionMatchesTheReference) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    for (const fsdp_dtype grad : {fsdp_dtype{0}, fsdp_dtype{FSDP_FLOAT32}})
      for (const fsdp_dtype reduce : {fsdp_dtype{0}, fsdp_dtype{FSDP_BFLOAT16}, fsdp_dtype{FSDP_FLOAT32}}) {
        Scenario setup = nccl_scenario(strategy, 3);
        setup.set_dtype(FSDP_BFLOAT16);
        setup.model.grad_dtype = grad;
        setup.model.reduce_dtype = reduce;
        setup.model.reduce_policy = strategy == FSDP_STRATEGY_OPTIM ? FSDP_REDUCE_POLICY_LAST : 0;
        expect_trains(setup, "strategy " + std::to_string(strategy) + ", grad " + std::to_string(grad) + ", reduce " +
                                 std::to_string(reduce));
      }
}

TEST(Nccl, LowPrecisionOfReplicasMatchesTheReference) {
  for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM}) {
    Scenario setup = with_replicas(nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4), outer);
    setup.set_dtype(FSDP_BFLOAT16);
    expect_trains(setup, "outer " + std::to_string(outer));
  }
}

TEST(Nccl, TypesOfGroupsMatchTheReference) {
  for (const fsdp_strategy strategy : strategies)
    for (const fsdp_dtype compute : {FSDP_BFLOAT16, FSDP_FLOAT16})
      for (const uint32_t ranks : {1u, 3u}) {
        Scenario setup = nccl_scenario(strategy, ranks);
        setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
        setup.set_dtype(compute);
        setup.model.grad_dtype = FSDP_FLOAT32;
        setup.groups[1].options.grad_dtype = FSDP_FLOAT16;
        setup.groups[2].options.reduce_dtype = FSDP_BFLOAT16;
        expect_trains(setup, "strategy " + std::to_string(strategy) + ", compute " + std::to_string(compute));
      }
}

TEST(Nccl, DelaysAndOrdersByEventsChangeNoBit) {
  const Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  simulated::set_delay(300, 11);
  const auto outcomes = train_threads(setup);
  simulated::set_delay(0, 0);
  EXPECT_EQ(difference(setup, outcomes), "");
}

// The ranks have enqueued different work, which waits on the GPUs. Over NCCL it is aborted, without waiting for the
// timeout.
void expect_goes_on(Scenario setup, const std::function<void(Rank &, uint32_t)> &differ) {
  setup.microbatches = 1;
  setup.clip = 0;
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.context.timeout_ms = 60'000;
  std::vector<std::vector<std::vector<float>>> weights(setup.ranks);
  const double start = now();
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (uint32_t step = 0; step < 2; ++step) {
      differ(rank, r);
      FSDP(fsdp_discard_step(rank.model, stream()));
      clean_step(rank, step);
    }
    weights[r] = rank.read_all();
    FSDP(fsdp_close_context(context));
  });
  EXPECT_LT(now() - start, 20);
  setup.steps = 2;
  const Outcome expected = reference(setup);
  for (uint32_t r = 0; r < setup.ranks; ++r) EXPECT_TRUE(same_bits(weights[r], expected.weights)) << "rank " << r;
}

TEST(Nccl, AStepWithAGatherThatAPeerDoesNotMakeIsDiscarded) {
  expect_goes_on(nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), [](Rank &rank, uint32_t r) {
    if (r == 1) FSDP(fsdp_prefetch(rank.groups[2], FSDP_FORWARD, 0, stream()));
  });
}

// The ranks of one row have made reduces that those of the other row have not, so on each GPU of that row communicators
// of both axes wait.
TEST(Nccl, AStepThatDiffersBetweenReplicasIsDiscarded) {
  for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM})
    expect_goes_on(with_replicas(nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4), outer),
                   [](Rank &rank, uint32_t r) {
                     if (r == 0) {
                       FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
                       FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
                     }
                     if (r >= 2) {
                       put_all(rank, 2, 1.0F);
                       FSDP(fsdp_reduce_grad(rank.groups[2], FSDP_LAST, stream()));
                     }
                   });
}

// Work that waits on the GPU for an absent peer ends with its model, and affects nothing else.
TEST(Nccl, AModelThatIsDestroyedInTheMiddleOfAStepLeavesItsContextWhole) {
  Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.microbatches = 1;
  const double start = now();
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    {
      Rank rank(context, setup);
      rank.load();
      if (r == 1) FSDP(fsdp_prefetch(rank.groups[2], FSDP_FORWARD, 0, stream()));
    }
    Rank rank(context, setup);
    rank.load();
    clean_step(rank, 0);
    FSDP(fsdp_close_context(context));
  });
  EXPECT_LT(now() - start, 10);
}

// Memory is registered as windows or as buffers; otherwise NCCL would copy through its own buffers.
TEST(Nccl, MemoryThatItReadsAndWritesIsRegistered) {
  Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.microbatches = 1;
  void *const library = ::dlopen(std::getenv("FSDP_NCCL_LIBRARY"), RTLD_NOW | RTLD_NODELETE);
  ASSERT_NE(library, nullptr) << ::dlerror();
  const auto *control =
      static_cast<const simulated::nccl::Control *>(::dlsym(library, simulated::nccl::control_symbol));
  ASSERT_NE(control, nullptr);
  using simulated::nccl::Count;
  const auto count = [&](std::initializer_list<Count> counts) {
    int64_t sum = 0;
    for (const Count one : counts) sum += control->count(one);
    return sum;
  };
  const auto launched = [&] { return count({Count::all_gathers, Count::reduce_scatters}); };
  const auto registered = [&] { return count({Count::registered_collectives, Count::buffered_collectives}); };
  const int64_t launched_before = launched(), registered_before = registered();
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    clean_step(rank, 0);
    FSDP(fsdp_close_context(context));
  });
  EXPECT_GE(launched() - launched_before, 2 * 2 * 4) << "gathers and reduces of four groups on two ranks";
  EXPECT_EQ(registered() - registered_before, launched() - launched_before);
}

// NCCL does not end a communicator before the graphs that captured its collectives: a line says which one it is.
TEST(Nccl, AGraphThatOutlivesItsModelIsLogged) {
  Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  std::string lines;
  setup.context.log_data = &lines;
  setup.context.log = [](void *data, fsdp_log_level, const char *line) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    *static_cast<std::string *>(data) += std::string(line) + '\n';
  };
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    cudaGraph_t graph = nullptr;
    const auto caller = static_cast<cudaStream_t>(stream());
    {
      Rank rank(context, setup);
      rank.load();
      REQUIRE(cudaStreamBeginCapture(caller, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
      FSDP(fsdp_begin_capture(rank.model, caller));
      FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, caller));
      FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, caller));
      fsdp_capture *capture = nullptr;
      FSDP(fsdp_end_capture(rank.model, caller, &capture));
      REQUIRE(cudaStreamEndCapture(caller, &graph) == cudaSuccess);
      fsdp_destroy_capture(capture);
    }
    REQUIRE(cudaGraphDestroy(graph) == cudaSuccess);
    FSDP(fsdp_close_context(context));
  });
  EXPECT_NE(lines.find("'gather' of rank 0 cannot end: graphs that captured its work still exist"), std::string::npos)
      << lines;
  EXPECT_EQ(lines.find("'reduce'"), std::string::npos) << lines;
}

}  // namespace
