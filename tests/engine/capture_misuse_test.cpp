// SPDX-License-Identifier: Apache-2.0
// Calls that cannot be part of a graph are refused: the error has the reason and the call's name, and nothing is
// changed. If a call fails during a capture, that capture fails on every rank.
#include <gtest/gtest.h>

#include "capture_calls.h"

using namespace harness;

namespace {

// These calls need the host to wait, or belong to another time of the step. Each says so, and the capture in which it
// was made fails.
TEST(CaptureMisuse, WhatCannotBePartOfAGraphIsRefused) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const std::vector<NamedCall> in_window = {
      {"fsdp_get_grad_norm", get_norm},       {"fsdp_get_param_grad_norms", get_param_norms},
      {"fsdp_count_zero_grads", count_zeros}, {"fsdp_clip_grads", clip},
      {"fsdp_check_grads", check_finite},     {"fsdp_load_param", load_param},
      {"fsdp_load_chunk", load_chunk},        {"fsdp_load_grad", load_grad},
      {"fsdp_read_grad", read_grad},          {"fsdp_next_shard_chunk", next_chunk}};
  const std::vector<NamedCall> any_time = {
      {"fsdp_get_param_weight_norms", get_weight_norms},
      {"fsdp_read_param", read_param},
      {"fsdp_apply_grads", apply_with_norm},
      {"fsdp_begin_update", [](Rank &rank, cudaStream_t s) { return fsdp_begin_update(rank.model, s); }},
      {"fsdp_discard_step", [](Rank &rank, cudaStream_t s) { return fsdp_discard_step(rank.model, s); }}};
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    fsdp_capture *capture = nullptr;
    require_error(fsdp_end_capture(rank.model, stream, &capture), FSDP_INVALID_STATE, {"fsdp_begin_capture first"});
    require_error(fsdp_begin_capture(rank.model, stream), FSDP_INVALID_STATE, {"cudaStreamBeginCapture"});
    const auto expect_refused_in_capture = [&](const NamedCall &call) {
      require_error(call.call(rank, stream), FSDP_INVALID_STATE, {call.name, "captured into a graph"});
      end_spoilt_capture(rank, stream, {"rank 0", call.name, "FSDP_INVALID_STATE", "captured into a graph"});
    };
    for (const NamedCall &call : in_window) {
      begin_capture(rank, stream);
      pass(rank, stream, true);
      FSDP(fsdp_finish_grads(rank.model, 0.5, 0, stream));
      expect_refused_in_capture(call);
    }
    for (const NamedCall &call : any_time) {
      begin_capture(rank, stream);
      expect_refused_in_capture(call);
    }
    for (int i = 0; i < steps; ++i) step(rank, stream, lr_of(i));  // as if nothing had been
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

TEST(CaptureMisuse, AScheduleWithoutOrderHasNoGraph) {
  Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  setup.schedule = FSDP_SCHEDULE_ANY;
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    require_error(fsdp_begin_capture(rank.model, stream), FSDP_UNSUPPORTED,
                  {"fsdp_begin_capture", "FSDP_SCHEDULE_ANY", "fsdp_set_schedule"});
    for (int i = 0; i < steps; ++i) step(rank, stream, lr_of(i));
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

TEST(CaptureMisuse, PlanesInAFileHaveNoGraph) {
  Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  setup.model.state_home = FSDP_HOME_FILE;
  setup.model.home_directory = "/var/tmp";
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    require_error(fsdp_begin_capture(rank.model, stream), FSDP_UNSUPPORTED,
                  {"fsdp_begin_capture", "FSDP_HOME_FILE", "FSDP_HOME_HOST"});
    for (int i = 0; i < steps; ++i) step(rank, stream, lr_of(i));
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

TEST(CaptureMisuse, ACaptureHasOneStepWithoutANumber) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    begin_capture(rank, stream);
    step(rank, stream, 0);
    pass(rank, stream, true);
    FSDP(fsdp_finish_grads(rank.model, 0.5, 0, stream));
    require_error(fsdp_step_adamw(rank.model, 0.1, nullptr, stream), FSDP_UNSUPPORTED,
                  {"fsdp_step_adamw", "has a step already"});
    end_spoilt_capture(rank, stream, {"fsdp_step_adamw", "FSDP_UNSUPPORTED", "has a step already"});
    begin_capture(rank, stream);
    pass(rank, stream, true);
    FSDP(fsdp_finish_grads(rank.model, 0.5, 0, stream));
    fsdp_adamw_options third = FSDP_ADAMW_OPTIONS_INIT;
    third.step = 3;
    require_error(fsdp_step_adamw(rank.model, 0.1, &third, stream), FSDP_INVALID_ARGUMENT,
                  {"fsdp_step_adamw", "every replay is another step"});
    end_spoilt_capture(rank, stream, {"fsdp_step_adamw", "every replay is another step"});
    step(rank, stream, 0.1);
  });
}

TEST(CaptureMisuse, CapturesAndReplaysDoNotNest) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    Graph graph(rank, stream, [&] { step(rank, stream, 0); });
    begin_capture(rank, stream);
    require_error(fsdp_begin_capture(rank.model, stream), FSDP_INVALID_STATE,
                  {"fsdp_begin_capture", "captured already"});
    end_spoilt_capture(rank, stream, {"fsdp_begin_capture", "captured already"});
    begin_capture(rank, stream);
    require_error(fsdp_prepare_replay(graph.capture(), 0, stream), FSDP_INVALID_STATE,
                  {"fsdp_prepare_replay", "is being captured"});
    end_spoilt_capture(rank, stream, {"fsdp_prepare_replay", "is being captured"});
    begin_capture(rank, stream);
    require_error(fsdp_close_context(rank.context), FSDP_INVALID_STATE,
                  {"fsdp_close_context", "is being captured", "fsdp_end_capture"});
    fsdp_capture *capture = nullptr;  // the close was not a call on the model
    FSDP(fsdp_end_capture(rank.model, stream, &capture));
    end_cuda_capture(stream);
    fsdp_destroy_capture(capture);
    graph.replay(0.1);
  });
}

// Norms of a context's models share memory, and a graph would not wait for it.
TEST(CaptureMisuse, ANormOfAGraphNeedsAContextOfItsOwn) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    const auto clipped = [&] {
      pass(rank, stream, true);
      FSDP(fsdp_finish_grads(rank.model, 0.5, 0, stream));
      return fsdp_clip_grads(rank.model, nullptr, 0.25, stream, nullptr);
    };
    begin_capture(rank, stream);
    FSDP(clipped());
    fsdp_capture *capture = nullptr;
    FSDP(fsdp_end_capture(rank.model, stream, &capture));
    cudaGraph_t graph = nullptr;
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphDestroy(graph));
    const Rank other(rank.context, setup);
    const char *const why = "the only model that its context has ever had";
    require_error(fsdp_prepare_replay(capture, 0, stream), FSDP_UNSUPPORTED, {"fsdp_prepare_replay", why});
    fsdp_destroy_capture(capture);
    begin_capture(rank, stream);
    require_error(clipped(), FSDP_UNSUPPORTED, {"fsdp_clip_grads", why});
    end_spoilt_capture(rank, stream, {"fsdp_clip_grads", why});
  });
}

// Work that another model enqueues could become part of the graph, or spoil it.
TEST(CaptureMisuse, OtherModelsOfTheContextWait) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    Rank other(rank.context, setup), unsealed(rank.context, setup, false);
    const Stream own;
    other.load();
    begin_capture(rank, stream);
    const std::vector<std::string> why = {"another model of this context is being captured"};
    require_error(fsdp_unshard(other.groups[0], FSDP_FORWARD, 0, own), FSDP_INVALID_STATE, why);
    require_error(fsdp_unshard(other.groups[0], FSDP_FORWARD, 0, stream), FSDP_INVALID_STATE, why);
    require_error(fsdp_begin_update(other.model, own), FSDP_INVALID_STATE, why);
    require_error(read_param(other, own), FSDP_INVALID_STATE, why);
    require_error(fsdp_seal_model(unsealed.model), FSDP_INVALID_STATE, {"fsdp_seal_model", why[0]});
    require_error(fsdp_begin_capture(other.model, stream), FSDP_INVALID_STATE, {"fsdp_begin_capture", why[0]});
    step(rank, stream, 0);
    // Those calls were not the model's, so the capture stays valid.
    fsdp_capture *capture = nullptr;
    FSDP(fsdp_end_capture(rank.model, stream, &capture));
    EXPECT_GT(end_cuda_capture(stream), 0u);
    fsdp_destroy_capture(capture);
    FSDP(fsdp_seal_model(unsealed.model));
    step(other, own, 0.1);
  });
}

TEST(CaptureMisuse, ACallThatFailsSpoilsTheCaptureOfEveryRank) {
  NEEDS_NCCL();
  const Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    step(rank, stream, lr_of(0));
    begin_capture(rank, stream);
    pass(rank, stream, true);
    if (rank.rank == 1)
      require_error(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, stream), FSDP_INVALID_STATE, {"no EVAL hold"});
    update(rank, stream, 0);
    end_spoilt_capture(rank, stream,
                       {"fsdp_end_capture", "rank 1", "fsdp_reshard failed with FSDP_INVALID_STATE", "no EVAL hold"});
    for (int i = 1; i < steps; ++i) step(rank, stream, lr_of(i));
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

// The numbers that a graph computes with are fixed at its capture, so they are compared there.
TEST(CaptureMisuse, OtherNumbersOnRanksAreReported) {
  NEEDS_NCCL();
  run(nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), [&](Rank &rank, cudaStream_t stream) {
    step(rank, stream, 0.1);
    begin_capture(rank, stream);
    pass(rank, stream, true);
    FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream));
    fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
    options.beta2 = rank.rank ? 0.95 : 0.99;
    require_error(fsdp_step_adamw(rank.model, 0.1, &options, stream), FSDP_MISMATCH, {"beta2", "0.95", "0.99"});
    end_spoilt_capture(rank, stream, {"fsdp_step_adamw failed with FSDP_MISMATCH", "beta2"});
    begin_capture(rank, stream);
    pass(rank, stream, true);
    FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream));
    FSDP(fsdp_scale_grads(rank.model, rank.rank ? 2 : 3, stream));
    fsdp_capture *capture = nullptr;
    require_error(fsdp_end_capture(rank.model, stream, &capture), FSDP_MISMATCH,
                  {"fsdp_scale_grads by 2", "fsdp_scale_grads by 3"});
    end_cuda_capture(stream);
    // The failed capture leaves nothing behind.
    step(rank, stream, 0.1);
    Graph graph(rank, stream, [&] {
      pass(rank, stream, true);
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream));
      FSDP(fsdp_scale_grads(rank.model, 2, stream));
    });
    graph.replay(0);
    // The graph has scaled on every rank; now one does it again.
    if (rank.rank) FSDP(fsdp_scale_grads(rank.model, 5, stream));
    require_error(fsdp_step_adamw(rank.model, 0.1, nullptr, stream), FSDP_MISMATCH,
                  {"number 2", "fsdp_scale_grads by 5", "none"});
    FSDP(fsdp_discard_step(rank.model, stream));
  });
}

// ... also where the capture can no longer be ended on one rank.
TEST(CaptureMisuse, ACaptureThatOneRankCannotEndIsOfNoUseOnAny) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    const Stream other;
    begin_capture(rank, stream);
    fsdp_capture *capture = nullptr;
    const double begin = now();
    require_error(fsdp_end_capture(rank.model, rank.rank == 1 ? other : stream, &capture), FSDP_INVALID_STATE,
                  {"fsdp_end_capture", "rank 1", "not"});
    EXPECT_LT(now() - begin, 10.0);
    cudaGraph_t recorded = nullptr;
    if (cudaStreamEndCapture(stream, &recorded) == cudaSuccess) cudaGraphDestroy(recorded);
    step(rank, stream, 0.1);
  });
}

// A capture also fails on all ranks if one rank cannot begin it. The next capture succeeds.
TEST(CaptureMisuse, ABeginThatFailsOnOneRankSpoilsThatCaptureOnly) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    fsdp_capture *capture = nullptr;
    const auto begin = [&] {
      if (rank.rank == 0) return begin_capture(rank, stream);
      require_error(fsdp_begin_capture(rank.model, stream), FSDP_INVALID_STATE, {"cudaStreamBeginCapture"});
    };
    const double start = now();
    begin();
    require_error(fsdp_end_capture(rank.model, stream, &capture), FSDP_INVALID_STATE,
                  {"fsdp_end_capture", "rank 1: fsdp_begin_capture failed with FSDP_INVALID_STATE",
                   "cudaStreamBeginCapture", "the model is as before"});
    if (rank.rank == 0) end_cuda_capture(stream);
    begin();  // and rank 1 does not make this call
    if (rank.rank == 0) {
      require_error(fsdp_end_capture(rank.model, stream, &capture), FSDP_INVALID_STATE,
                    {"rank 1 called fsdp_discard_step"});
      end_cuda_capture(stream);
    }
    FSDP(fsdp_discard_step(rank.model, stream));
    require_error(fsdp_end_capture(rank.model, stream, &capture), FSDP_INVALID_STATE, {"fsdp_begin_capture first"});
    EXPECT_LT(now() - start, 10.0) << "that is half the timeout";
    FSDP(fsdp_unshard(rank.groups[3], FSDP_BACKWARD, 0, stream));
    Graph math(rank, stream, [&] { enqueue_grads(rank, 3, stream); });
    math.replay(0);
    FSDP(fsdp_discard_step(rank.model, stream));
    step(rank, stream, 0.1);
  });
}

TEST(CaptureMisuse, StagingInACaptureIsUnsupportedAndTheModelGoesOn) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    begin_capture(rank, stream);
    require_error(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream), FSDP_UNSUPPORTED,
                  {"cannot be part of a graph", "staging"});
    end_spoilt_capture(rank, stream, {"fsdp_unshard failed with FSDP_UNSUPPORTED", "staging"});
    for (int i = 0; i < steps; ++i) step(rank, stream, lr_of(i));
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

}  // namespace
