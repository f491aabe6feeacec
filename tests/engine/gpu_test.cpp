// SPDX-License-Identifier: Apache-2.0
// Models on GPUs whose bytes are staged: the bits of the host, the memory that was planned, no allocation or
// synchronization in a step, and errors where ranks call different things. Runs on the simulated CUDA, and says nothing
// about hardware.
#include <gtest/gtest.h>

#include <cstring>

#include "device.h"
#include "harness.h"
#include "simulated_cuda/simulated.h"

using namespace harness;

namespace {

Scenario gpu_scenario(fsdp_strategy strategy, uint32_t ranks) {
  Scenario setup = scenario_of(strategy, ranks, 0);
  setup.microbatches = 2;
  setup.clip = 3;
  setup.context.device = FSDP_DEVICE_CUDA;
  setup.context.device_transport = FSDP_TRANSPORT_STAGING;
  return setup;
}

Scenario on_host(Scenario setup) {
  setup.context.device = FSDP_DEVICE_HOST;
  setup.context.device_transport = 0;
  return setup;
}

void expect_bits_of_the_host(const Scenario &setup, const std::string &what) {
  const auto host = train_threads(on_host(setup));
  const auto gpu = train_threads(setup);
  EXPECT_EQ(difference(setup, gpu), "") << what;
  for (uint32_t r = 0; r < setup.ranks; ++r) {
    EXPECT_TRUE(same_bits(gpu[r].weights, host[0].weights)) << what << ", rank " << r;
    EXPECT_TRUE(same_bits(gpu[r].grads, host[r].grads)) << what << ", rank " << r;
    EXPECT_EQ(gpu[r].norms, host[0].norms) << what << ", rank " << r;
  }
}

TEST(Gpu, TrainingHasTheBitsOfTheHost) {
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {1u, 2u, 3u, 4u})
      expect_bits_of_the_host(gpu_scenario(strategy, ranks),
                              "strategy " + std::to_string(strategy) + ", ranks " + std::to_string(ranks));
}

TEST(Gpu, LowPrecisionHasTheBitsOfTheHost) {
  for (const fsdp_strategy strategy : strategies)
    for (const fsdp_dtype compute : {FSDP_BFLOAT16, FSDP_FLOAT16})
      for (const fsdp_dtype reduce : {0, FSDP_BFLOAT16 + 0}) {
        Scenario setup = gpu_scenario(strategy, 3);
        setup.set_dtype(compute);
        setup.model.grad_dtype = reduce ? FSDP_FLOAT32 : 0;
        setup.model.reduce_dtype = reduce;
        setup.groups[1].options.grad_dtype = FSDP_FLOAT16;
        setup.groups[2].options.reduce_dtype = FSDP_FLOAT16;
        expect_bits_of_the_host(setup, "strategy " + std::to_string(strategy) + ", compute " + std::to_string(compute) +
                                           ", reduce " + std::to_string(reduce));
      }
}

TEST(Gpu, ForcedCommunicationOfOneRankHasTheBitsOfTheHost) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = gpu_scenario(strategy, 1);
    setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
    expect_bits_of_the_host(setup, "strategy " + std::to_string(strategy));
  }
}

TEST(Gpu, ReplicasHaveTheBitsOfTheHost) {
  for (const fsdp_strategy strategy : strategies)
    for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM}) {
      Scenario setup = gpu_scenario(strategy, 4);
      setup.mesh.replicate_size = 2;
      setup.mesh.shard_size = 2;
      setup.model.outer_strategy = outer;
      expect_bits_of_the_host(setup, "strategy " + std::to_string(strategy) + ", outer " + std::to_string(outer));
    }
}

TEST(Gpu, AShardAxisOverHostsHasTheBitsOfTheHost) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = gpu_scenario(strategy, 4);
    setup.context.ranks_per_host = 2;
    expect_bits_of_the_host(setup, "strategy " + std::to_string(strategy));
  }
}

// Each option has a test of its own, so that one that hangs is named.
class GpuOptions : public testing::TestWithParam<const char *> {};

TEST_P(GpuOptions, OptionsOfTheGpuChangeNoBit) {
  const std::string what = GetParam();
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
    Scenario setup = gpu_scenario(strategy, 2);
    setup.recompute = what == "recompute";
    setup.eval = what == "eval";
    setup.put = what == "put";
    if (what == "debug") setup.context.flags = FSDP_CONTEXT_DEBUG;
    if (what == "trace") setup.context.flags = FSDP_CONTEXT_TRACE;
    if (what == "inline") setup.context.flags = FSDP_CONTEXT_NO_OVERLAP;
    if (what == "ahead") setup.model.prefetch_depth = 2;
    if (what == "interleaved") setup.schedule = FSDP_SCHEDULE_INTERLEAVED;
    expect_bits_of_the_host(setup, what + ", strategy " + std::to_string(strategy));
  }
}

INSTANTIATE_TEST_SUITE_P(Each, GpuOptions,
                         testing::Values("recompute", "eval", "put", "debug", "trace", "inline", "ahead",
                                         "interleaved"));

// Its memory has no pages that are copied when they are written.
TEST(Gpu, ThereAreNoPrivateViews) {
  const Scenario setup = gpu_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
    options.view_kind = FSDP_VIEWS_PRIVATE;
    fsdp_model *model = nullptr;
    require_error(fsdp_create_model(context, &options, &model), FSDP_UNSUPPORTED,
                  {"fsdp_create_model: FSDP_VIEWS_PRIVATE", "memory of a GPU", "leave view_kind 0"});
    options.view_kind = FSDP_VIEWS_READ_ONLY;
    FSDP(fsdp_create_model(context, &options, &model));
    fsdp_destroy_model(model);
    FSDP(fsdp_close_context(context));
  });
}

TEST(Gpu, CopiedWeightsAreGatheredAgainAfterARestore) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = gpu_scenario(strategy, 2);
    setup.model.flags = FSDP_MODEL_NO_PREFETCH;
    if (strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS) setup.groups[0].options.flags = FSDP_GROUP_RESIDENT;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      fsdp_group *group = rank.groups[0];
      if (strategy != FSDP_STRATEGY_OPTIM_GRADS_PARAMS) {
        require_error(fsdp_restore_view(group), FSDP_INVALID_STATE, {"group 'embed'", "on the host device"});
        return;
      }
      fsdp_tensor view = FSDP_TENSOR_INIT;
      FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, stream()));
      FSDP(fsdp_get_param(group, 0, FSDP_FORWARD, &view));
      store_elements(view.data, view.dtype, std::vector<float>(view.element_count, 9));
      require_error(fsdp_restore_view(group), FSDP_INVALID_STATE, {"still held (FORWARD x 1)"});
      FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, stream()));
      FSDP(fsdp_restore_view(group));
      const uint64_t gathers = rank.stats().gathers;
      FSDP(fsdp_unshard(group, FSDP_BACKWARD, 0, stream()));
      REQUIRE(rank.stats().gathers == gathers + 1);
      REQUIRE(rank.view(0, 0, FSDP_BACKWARD) == rank.read(0, 0));
      FSDP(fsdp_reshard(group, FSDP_BACKWARD, 0, stream()));
      FSDP(fsdp_discard_step(rank.model, stream()));
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Gpu, WhatIsPlannedIsAllocated) {
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {1u, 3u}) {
      Scenario setup = gpu_scenario(strategy, ranks);
      setup.steps = 1;
      setup.model.reduce_dtype = FSDP_BFLOAT16;
      const auto outcomes = train_threads(setup);
      for (uint32_t r = 0; r < ranks; ++r) {
        fsdp_context *planning = nullptr;
        FSDP(fsdp_create_plan_context(ranks, r, &setup.context, &planning));
        Memory planned;
        {
          const Rank rank(planning, setup);
          planned = memory_of(rank.model, r);
        }
        fsdp_destroy_context(planning);
        for (int role = 0; role <= last_role; ++role) {
          EXPECT_EQ(outcomes[r].stats.allocated_bytes[role], outcomes[r].memory.role_bytes[role]) << "role " << role;
          EXPECT_EQ(planned.role_bytes[role], outcomes[r].memory.role_bytes[role]) << "role " << role;
        }
      }
    }
}

TEST(Gpu, DelaysAtEveryEdgeChangeNoBit) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = gpu_scenario(strategy, 3);
    simulated::set_delay(2000, 7 + static_cast<uint64_t>(strategy));
    setup.context.debug_delay_us = 1000;
    setup.context.debug_delay_seed = 3;
    const auto outcomes = train_threads(setup);
    simulated::set_delay(0, 0);
    EXPECT_EQ(difference(setup, outcomes), "") << strategy;
  }
}

// Copies by the harness are synchronous, so the gradients here are filled by the stream.
void step_on_stream(Rank &rank, fsdp_stream stream, float value) {
  for (size_t g = 0; g < rank.groups.size(); ++g) {
    FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, stream));
    FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, stream));
  }
  for (size_t g = rank.groups.size(); g-- > 0;) {
    FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, 0, stream));
    FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, 0, stream));
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
      fsdp_tensor grad = FSDP_TENSOR_INIT;
      int32_t accumulate = 0;
      FSDP(fsdp_acquire_grad(rank.groups[g], p, 0, stream, &grad, &accumulate));
      const uint64_t count = grad.element_count;
      auto *to = static_cast<float *>(grad.data);
      require(simulated::enqueue(stream, [=] { std::fill_n(to, count, value); }) == cudaSuccess, "a kernel");
    }
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream));
  }
  FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream));
  FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream));
}

constexpr const char *blocking_calls[] = {"cudaMalloc",
                                          "cudaFree",
                                          "cudaHostAlloc",
                                          "cudaHostRegister",
                                          "cudaStreamCreateWithFlags",
                                          "cudaStreamCreateWithPriority",
                                          "cudaEventCreateWithFlags",
                                          "cudaDeviceSynchronize",
                                          "cudaStreamSynchronize",
                                          "cudaEventSynchronize",
                                          "cudaMemcpy",
                                          "cudaMemset",
                                          "cuMemCreate",
                                          "cuMemMap"};

TEST(Gpu, ASteadyStepNeitherAllocatesNorSynchronizes) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = gpu_scenario(strategy, 2);
    std::vector<uint64_t> before(std::size(blocking_calls));
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      const auto meet = [&] {
        double one = 1;
        FSDP(fsdp_all_reduce_values(context, nullptr, &one, 1, FSDP_VALUE_SUM));
      };
      for (int step = 0; step < 2; ++step) step_on_stream(rank, stream(), 0.5f);
      meet();
      if (r == 0)
        for (size_t i = 0; i < before.size(); ++i) before[i] = simulated::calls(blocking_calls[i]);
      const uint64_t allocations = rank.stats().allocations;
      meet();
      for (int step = 0; step < 3; ++step) step_on_stream(rank, stream(), 0.25f);
      meet();
      if (r == 0) {
        for (size_t i = 0; i < before.size(); ++i)
          EXPECT_EQ(simulated::calls(blocking_calls[i]), before[i]) << blocking_calls[i] << ", strategy " << strategy;
      }
      EXPECT_EQ(rank.stats().allocations, allocations);
      meet();
      FSDP(fsdp_close_context(context));
    });
  }
}

// Each part of a step uses another stream of the caller. The library orders what one stream writes and another reads.
TEST(Gpu, StreamsThatTakeTurnsHaveTheBitsOfOne) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = gpu_scenario(strategy, 2);
    std::vector<std::vector<float>> results[2];
    for (const bool several : {false, true}) {
      simulated::set_delay(300, 11);
      run_threads(setup, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        cudaStream_t streams[3];
        for (cudaStream_t &stream : streams)
          require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "a stream");
        for (uint32_t step = 0; step < 4; ++step)
          step_on_stream(rank, streams[several ? step % 3 : 0], static_cast<float>(step) + 0.5f);
        auto weights = rank.read_all();
        if (r == 0) results[several] = std::move(weights);
        FSDP(fsdp_close_context(context));
      });
      simulated::set_delay(0, 0);
    }
    EXPECT_TRUE(same_bits(results[0], results[1])) << "strategy " << strategy;
    // Four steps along gradients of one sign have moved every weight.
    for (uint32_t p = 0; p < results[1].size(); ++p)
      for (size_t i = 0; i < results[1][p].size(); ++i) ASSERT_LT(results[1][p][i], initial_weight(p, i) - 0.01f);
  }
}

TEST(Gpu, RanksThatGatherDifferentGroupsAreTold) {
  Scenario setup = gpu_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.context.timeout_ms = 5000;
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        for (size_t i = 0; i < 2; ++i) {
          const size_t g = r == 0 ? i : 1 - i;
          FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, stream()));
          FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, stream()));
        }
        FSDP(fsdp_begin_update(rank.model, stream()));
      },
      &errors);
  for (const std::string &error : errors) {
    EXPECT_NE(error.find("FSDP_MISMATCH"), std::string::npos) << error;
    EXPECT_NE(error.find("'embed'"), std::string::npos) << error;
    EXPECT_NE(error.find("'layer.0'"), std::string::npos) << error;
  }
}

// If a peer does not make a gather, and no stream waits for it, the next meeting reports it, and the step can be
// discarded.
TEST(Gpu, AGatherThatAPeerDoesNotMakeIsFoundAtTheMeeting) {
  Scenario setup = gpu_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.microbatches = 1;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    if (r == 1) FSDP(fsdp_prefetch(rank.groups[2], FSDP_FORWARD, 0, stream()));
    require_error(fsdp_begin_update(rank.model, stream()), FSDP_MISMATCH,
                  {"as number 1", "rank 0 nothing more", "rank 1 gathered group 'layer.1'"});
    FSDP(fsdp_discard_step(rank.model, stream()));
    clean_step(rank, 0);
    FSDP(fsdp_close_context(context));
  });
}

// Pieces of the same size are gathered in another order, or in one launch instead of two, which no message shows.
TEST(Gpu, GathersOfOtherPiecesAreFoundAtTheMeeting) {
  Scenario setup = gpu_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = {{"layer", {{"a", {64, 32}}, {"b", {64, 32}}}}};
  setup.groups[0].params[1].piece = 1;
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  const auto piece = [](Rank &rank, uint32_t p) {
    FSDP(fsdp_unshard_piece(rank.groups[0], p, FSDP_FORWARD, 0, stream()));
    FSDP(fsdp_reshard_piece(rank.groups[0], p, FSDP_FORWARD, 0, stream()));
  };
  const auto whole = [](Rank &rank) {
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
  };
  const auto begin = [&](uint32_t r, Rank &rank, const std::function<void(Rank &)> &odd) {
    rank.load();
    if (r == 1) return odd(rank);
    piece(rank, 0);
    piece(rank, 1);
  };
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    begin(r, rank, [&](Rank &odd) { piece(odd, 1), piece(odd, 0); });
    require_error(
        fsdp_begin_update(rank.model, stream()), FSDP_MISMATCH,
        {"as number 1", "rank 0 gathered piece 0 of group 'layer'", "rank 1 gathered piece 1 of group 'layer'"});
    FSDP(fsdp_discard_step(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
  // The first messages differ in their length, so any call after them may tell.
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        begin(r, rank, whole);
        FSDP(fsdp_begin_update(rank.model, stream()));
      },
      &errors);
  for (const std::string &error : errors) {
    EXPECT_NE(error.find("FSDP_MISMATCH"), std::string::npos) << error;
    EXPECT_NE(error.find("'layer'"), std::string::npos) << error;
  }
}

// ROW planes on one rank and COLUMN planes on the other are as many bytes, and no message says which they are.
TEST(Gpu, GathersOfOtherPlanesAreFoundAtTheMeeting) {
  Scenario setup = gpu_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = equal_groups(1, 64, 32);
  setup.groups[0].params[0].quantization = FSDP_QUANTIZE_MXFP8;
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const fsdp_phase phase = r == 1 ? FSDP_BACKWARD : FSDP_FORWARD;
    FSDP(fsdp_unshard(rank.groups[0], phase, 0, stream()));
    FSDP(fsdp_reshard(rank.groups[0], phase, 0, stream()));
    require_error(fsdp_begin_update(rank.model, stream()), FSDP_MISMATCH,
                  {"as number 1", "rank 0 gathered group 'layer.0', rank 1 gathered group 'layer.0' for BACKWARD"});
    FSDP(fsdp_discard_step(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

TEST(Gpu, WhatMakesNoSenseOnAGpuIsRefused) {
  Scenario setup = gpu_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  fsdp_context *context = nullptr;
  fsdp_context_options options = setup.context;
  FSDP(fsdp_create_local_contexts(1, &options, &context));
  fsdp_model_options model_options = FSDP_MODEL_OPTIONS_INIT;
  model_options.unshard_mode = FSDP_UNSHARD_MAPPED;
  fsdp_model *model = nullptr;
  require_error(fsdp_create_model(context, &model_options, &model), FSDP_UNSUPPORTED, {"FSDP_UNSHARD_MAPPED", "GPU"});
  fsdp_destroy_context(context);
  options.device_index = -1;
  require_error(fsdp_create_local_contexts(1, &options, &context), FSDP_INVALID_ARGUMENT, {"device_index is -1"});
  options.device_index = FSDP_DEVICE_INDEX(7);
  EXPECT_NE(fsdp_create_local_contexts(1, &options, &context), FSDP_OK);
  EXPECT_NE(last_message().find("7"), std::string::npos) << last_message();
}

}  // namespace
