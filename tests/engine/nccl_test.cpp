// SPDX-License-Identifier: Apache-2.0
// Training whose bytes NCCL's look-alike carries, between threads with a simulated GPU each: the reference's weights, the same
// bits in every run, and steps that ranks give up in the middle. It says nothing about NCCL's speed, nor about its sums.
#include <gtest/gtest.h>

#include <cstdlib>

#include "device.h"
#include "element.h"
#include "harness.h"
#include "simulated_cuda/simulated.h"

using namespace harness;

namespace {

constexpr fsdp_strategy strategies[] = {FSDP_NO_SHARD, FSDP_OPTIM, FSDP_OPTIM_GRADS, FSDP_OPTIM_GRADS_PARAMS};

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

void expect_reference(const Scenario &setup, const std::vector<Outcome> &outcomes, const std::string &what) {
  const Outcome expected = reference(setup);
  for (size_t r = 0; r < outcomes.size(); ++r) {
    ASSERT_EQ(outcomes[r].error, "") << what;
    ASSERT_EQ(outcomes[r].weights.size(), expected.weights.size()) << what;
    for (size_t p = 0; p < expected.weights.size(); ++p)
      EXPECT_LE(relative_l2(outcomes[r].weights[p], expected.weights[p]), 1e-5) << what << ", rank " << r << ", parameter " << p;
    ASSERT_EQ(outcomes[r].norms.size(), expected.norms.size());
    for (size_t s = 0; s < expected.norms.size(); ++s)
      EXPECT_NEAR(outcomes[r].norms[s], expected.norms[s], 1e-5 * expected.norms[s]) << what << ", rank " << r;
  }
}

void expect_trains(const Scenario &setup, const std::string &what) {
  const auto first = train_threads(setup);
  expect_reference(setup, first, what);
  for (uint32_t r = 0; r < setup.ranks; ++r)
    EXPECT_TRUE(same_bits(first[r].weights, first[0].weights)) << what << ", rank " << r;
  if (setup.ranks == 2) return;  // two addends have one sum
  const auto second = train_threads(setup);
  for (uint32_t r = 0; r < setup.ranks; ++r) {
    EXPECT_TRUE(same_bits(first[r].weights, second[r].weights)) << what << ", rank " << r;
    EXPECT_TRUE(same_bits(first[r].grads, second[r].grads)) << what << ", rank " << r;
    EXPECT_EQ(first[r].norms, second[r].norms) << what << ", rank " << r;
  }
}

TEST(Nccl, AllStrategiesMatchTheReference) {
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {2u, 3u, 4u})
      expect_trains(nccl_scenario(strategy, ranks), "strategy " + std::to_string(strategy) + ", ranks " + std::to_string(ranks));
}

TEST(Nccl, ReplicasMatchTheReference) {
  for (const fsdp_strategy strategy : {FSDP_NO_SHARD, FSDP_OPTIM_GRADS_PARAMS})
    for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM})
      expect_trains(with_replicas(nccl_scenario(strategy, 4), outer),
                    "strategy " + std::to_string(strategy) + ", outer " + std::to_string(outer));
}

TEST(Nccl, ForcedCommunicationOfOneRankMatchesTheReference) {
  for (const fsdp_strategy strategy : {FSDP_NO_SHARD, FSDP_OPTIM_GRADS_PARAMS}) {
    Scenario setup = nccl_scenario(strategy, 1);
    setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
    expect_trains(setup, "strategy " + std::to_string(strategy));
  }
}

TEST(Nccl, LowPrecisionMatchesTheReference) {
  for (const fsdp_strategy strategy : {FSDP_OPTIM, FSDP_OPTIM_GRADS_PARAMS}) {
    Scenario setup = nccl_scenario(strategy, 3);
    setup.set_dtype(FSDP_BFLOAT16);
    setup.model.grad_dtype = setup.model.reduce_dtype = FSDP_FLOAT32;
    expect_trains(setup, "strategy " + std::to_string(strategy));
  }
}

TEST(Nccl, DelaysAndOrdersByEventsChangeNoBit) {
  const Scenario setup = nccl_scenario(FSDP_OPTIM_GRADS_PARAMS, 3);
  const auto expected = train_threads(setup);
  simulated::set_delay(300, 11);
  const auto outcomes = train_threads(setup);
  simulated::set_delay(0, 0);
  for (uint32_t r = 0; r < setup.ranks; ++r) EXPECT_TRUE(same_bits(outcomes[r].weights, expected[r].weights)) << "rank " << r;
}

// What ranks have enqueued differs, and waits on the GPUs. With NCCL it is aborted; the timeout plays no part.
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
  std::vector<std::vector<std::vector<float>>> expected(setup.ranks);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (uint32_t step = 0; step < 2; ++step) clean_step(rank, step);
    expected[r] = rank.read_all();
    FSDP(fsdp_close_context(context));
  });
  for (uint32_t r = 0; r < setup.ranks; ++r) EXPECT_TRUE(same_bits(weights[r], expected[r])) << "rank " << r;
}

TEST(Nccl, AStepWithAGatherThatAPeerDoesNotMakeIsDiscarded) {
  expect_goes_on(nccl_scenario(FSDP_OPTIM_GRADS_PARAMS, 2), [](Rank &rank, uint32_t r) {
    if (r == 1) FSDP(fsdp_prefetch(rank.groups[2], FSDP_FORWARD, stream()));
  });
}

// The ranks of one row have reduced what those of the other have not: on each GPU of that row communicators of both axes wait.
TEST(Nccl, AStepThatDiffersBetweenReplicasIsDiscarded) {
  for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM})
    expect_goes_on(with_replicas(nccl_scenario(FSDP_OPTIM_GRADS_PARAMS, 4), outer), [](Rank &rank, uint32_t r) {
      if (r == 0) {
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, stream()));
        FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, stream()));
      }
      if (r >= 2) {
        put_all(rank, 2, 1.0F);
        FSDP(fsdp_reduce_grad(rank.groups[2], FSDP_LAST, stream()));
      }
    });
}

// What waits on the GPU for a peer that does not come ends with its model, and with nothing else.
TEST(Nccl, AModelThatIsDestroyedInTheMiddleOfAStepLeavesItsContextWhole) {
  Scenario setup = nccl_scenario(FSDP_OPTIM_GRADS_PARAMS, 2);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.microbatches = 1;
  const double start = now();
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    {
      Rank rank(context, setup);
      rank.load();
      if (r == 1) FSDP(fsdp_prefetch(rank.groups[2], FSDP_FORWARD, stream()));
    }
    Rank rank(context, setup);
    rank.load();
    clean_step(rank, 0);
    FSDP(fsdp_close_context(context));
  });
  EXPECT_LT(now() - start, 10);
}

// NCCL does not end a communicator before the graphs that captured its collectives: a line says which one it is.
TEST(Nccl, AGraphThatOutlivesItsModelIsLogged) {
  Scenario setup = nccl_scenario(FSDP_OPTIM_GRADS_PARAMS, 1);
  setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION | FSDP_MODEL_NO_PREFETCH;
  std::string lines;
  setup.context.log_data = &lines;
  setup.context.log = [](void *data, fsdp_log_level, const char *line) { *static_cast<std::string *>(data) += std::string(line) + '\n'; };
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    cudaGraph_t graph = nullptr;
    const auto caller = static_cast<cudaStream_t>(stream());
    {
      Rank rank(context, setup);
      rank.load();
      REQUIRE(cudaStreamBeginCapture(caller, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
      FSDP(fsdp_capture_begin(rank.model, caller));
      FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, caller));
      FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, caller));
      fsdp_capture *capture = nullptr;
      FSDP(fsdp_capture_end(rank.model, caller, &capture));
      REQUIRE(cudaStreamEndCapture(caller, &graph) == cudaSuccess);
      fsdp_destroy_capture(capture);
    }
    REQUIRE(cudaGraphDestroy(graph) == cudaSuccess);
    FSDP(fsdp_close_context(context));
  });
  EXPECT_NE(lines.find("'gather' of rank 0 cannot end: graphs that captured its work still exist"), std::string::npos) << lines;
  EXPECT_EQ(lines.find("'reduce'"), std::string::npos) << lines;
}

}  // namespace
