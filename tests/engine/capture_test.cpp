// SPDX-License-Identifier: Apache-2.0
// Steps as CUDA graphs: the bits of eager ones, the state after each replay, and errors where a replay does not fit. Runs on the
// simulated CUDA, whose captures have CUDA's rules for forks, joins and isolation.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <memory>

#include "harness.h"
#include "simulated_cuda/simulated.h"

using namespace harness;

namespace {

#define CUDA(call) require((call) == cudaSuccess, #call)

class Stream {
 public:
  Stream() { CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }  // NOLINT: as CUDA's own

 private:
  cudaStream_t stream_ = nullptr;
};

// A part of a step, captured.
class Graph {
 public:
  template <class Part>
  Graph(Rank &rank, cudaStream_t stream, Part part) : rank_(rank), stream_(stream) {
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    FSDP(fsdp_capture_begin(rank.model, stream));
    part();
    FSDP(fsdp_capture_end(rank.model, stream, &capture_));
    cudaGraph_t recorded = nullptr;
    CUDA(cudaStreamEndCapture(stream, &recorded));
    CUDA(cudaGraphInstantiate(&graph_, recorded, 0));
    CUDA(cudaGraphDestroy(recorded));
  }
  ~Graph() {
    cudaStreamSynchronize(stream_);
    cudaGraphExecDestroy(graph_);
    fsdp_destroy_capture(capture_);
  }
  Graph(const Graph &) = delete;
  Graph &operator=(const Graph &) = delete;

  void replay(double lr) {
    FSDP(fsdp_prepare_replay(capture_, lr, stream_));
    CUDA(cudaGraphLaunch(graph_, stream_));
    FSDP(fsdp_commit_replay(capture_, stream_));
  }
  fsdp_capture *capture() const { return capture_; }

 private:
  Rank &rank_;
  cudaStream_t stream_;
  fsdp_capture *capture_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

Scenario graph_scenario(fsdp_strategy strategy, uint32_t ranks = 1) {
  Scenario setup = scenario_of(strategy, ranks, 0);
  setup.context.device = FSDP_DEVICE_CUDA;
  setup.context.device_transport = FSDP_TRANSPORT_STAGING;
  return setup;
}

constexpr fsdp_strategy strategies[] = {FSDP_NO_SHARD, FSDP_OPTIM, FSDP_OPTIM_GRADS, FSDP_OPTIM_GRADS_PARAMS};

// A gradient that depends on the weight that is read when the work is done.
void enqueue_grad(Rank &rank, size_t g, size_t p, cudaStream_t stream) {
  fsdp_tensor weight = FSDP_TENSOR_INIT, grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_get_param(rank.groups[g], p, FSDP_BACKWARD, &weight));
  FSDP(fsdp_acquire_grad(rank.groups[g], p, stream, &grad, &accumulate));
  CUDA(simulated::enqueue(stream, [from = static_cast<const float *>(weight.data), to = static_cast<float *>(grad.data),
                                   count = grad.element_count, accumulate] {
    for (uint64_t i = 0; i < count; ++i) to[i] = (accumulate ? to[i] : 0.0f) + 0.25f * from[i] + 0.001f * static_cast<float>(i % 7);
  }));
}

void pass(Rank &rank, cudaStream_t stream, bool last) {
  for (fsdp_group *group : rank.groups) {
    FSDP(fsdp_unshard(group, FSDP_FORWARD, stream));
    FSDP(fsdp_reshard(group, FSDP_FORWARD, stream));
  }
  for (size_t g = rank.groups.size(); g-- > 0;) {
    FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, stream));
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) enqueue_grad(rank, g, p, stream);
    FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, stream));
    FSDP(fsdp_reduce_grad(rank.groups[g], last ? FSDP_LAST : 0, stream));
  }
}

void update(Rank &rank, cudaStream_t stream, double lr) {
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.weight_decay = 0.1;
  FSDP(fsdp_finish_grads(rank.model, 0.5, stream));
  FSDP(fsdp_step_adamw(rank.model, lr, &options, stream));
}

double lr_of(int step) { return 0.01 / (1 + step); }
constexpr int steps = 5;

using Weights = std::vector<std::vector<float>>;

// train(rank, stream) makes the steps; what it leaves on rank 0.
template <class Train>
Weights run(const Scenario &setup, Train train, fsdp_stats *stats = nullptr) {
  Weights weights;
  simulated::set_delay(200, 5);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    const Stream stream;
    rank.load();
    train(rank, stream);
    CUDA(cudaStreamSynchronize(stream));
    auto own = rank.read_all();
    if (r == 0) weights = std::move(own);
    if (r == 0 && stats) *stats = rank.stats();
    FSDP(fsdp_close_context(context));
  });
  simulated::set_delay(0, 0);
  return weights;
}

Weights train_eagerly(const Scenario &setup, int passes, fsdp_stats *stats = nullptr) {
  return run(
      setup,
      [&](Rank &rank, cudaStream_t stream) {
        for (int step = 0; step < steps; ++step) {
          for (int i = 0; i < passes; ++i) pass(rank, stream, i + 1 == passes);
          update(rank, stream, lr_of(step));
        }
      },
      stats);
}

TEST(Capture, AWholeStepAsAGraphHasTheBitsAndTheCountsOfEagerSteps) {
  for (const fsdp_strategy strategy : strategies) {
    const Scenario setup = graph_scenario(strategy);
    fsdp_stats eager = FSDP_STATS_INIT, replayed = FSDP_STATS_INIT;
    const Weights expected = train_eagerly(setup, 2, &eager);
    const Weights weights = run(
        setup,
        [&](Rank &rank, cudaStream_t stream) {
          Graph step(rank, stream, [&] {
            pass(rank, stream, false);
            pass(rank, stream, true);
            update(rank, stream, 123.0);  // of no replay
          });
          for (int i = 0; i < steps; ++i) step.replay(lr_of(i));
        },
        &replayed);
    EXPECT_TRUE(same_bits(weights, expected)) << "strategy " << strategy;
    EXPECT_EQ(replayed.version, eager.version);
    EXPECT_EQ(replayed.reduces, eager.reduces);
    EXPECT_EQ(replayed.gathers, eager.gathers);
  }
}

bool has_nccl() {
  const char *library = std::getenv("FSDP_NCCL_LIBRARY");
  return library && *library;
}

// Gathers and reduces are in the graph: NCCL's look-alike, which FSDP_NCCL_LIBRARY names, takes them as NCCL does.
TEST(Capture, RanksThatExchangeOverNcclCaptureTheirCollectives) {
  if (!has_nccl()) GTEST_SKIP() << "FSDP_NCCL_LIBRARY names no NCCL";
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = graph_scenario(strategy, 2);
    setup.context.device_transport = FSDP_TRANSPORT_NCCL;
    fsdp_stats eager = FSDP_STATS_INIT, replayed = FSDP_STATS_INIT;
    const Weights expected = train_eagerly(setup, 2, &eager);
    const Weights weights = run(
        setup,
        [&](Rank &rank, cudaStream_t stream) {
          pass(rank, stream, false);
          pass(rank, stream, true);
          update(rank, stream, lr_of(0));
          Graph step(rank, stream, [&] {
            pass(rank, stream, false);
            pass(rank, stream, true);
            update(rank, stream, 0);
          });
          for (int i = 1; i < steps; ++i) step.replay(lr_of(i));
        },
        &replayed);
    EXPECT_TRUE(same_bits(weights, expected)) << "strategy " << strategy;
    EXPECT_EQ(replayed.all_gathers, eager.all_gathers) << "strategy " << strategy;
    EXPECT_EQ(replayed.reduce_scatters + replayed.all_reduces, eager.reduce_scatters + eager.all_reduces);
  }
}

TEST(Capture, RanksThatReplayDifferentGraphsAreToldBeforeTheyRun) {
  if (!has_nccl()) GTEST_SKIP() << "FSDP_NCCL_LIBRARY names no NCCL";
  Scenario setup = graph_scenario(FSDP_OPTIM_GRADS_PARAMS, 2);
  setup.context.device_transport = FSDP_TRANSPORT_NCCL;
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    pass(rank, stream, true);
    update(rank, stream, 0.1);
    const auto step = [&] {
      pass(rank, stream, true);
      update(rank, stream, 0);
    };
    Graph first(rank, stream, step), second(rank, stream, step);
    Graph &own = rank.rank == 0 ? first : second;
    require_error(fsdp_prepare_replay(own.capture(), 0.1, stream), FSDP_MISMATCH, {"replayed capture 1", "replayed capture 2"});
    FSDP(fsdp_discard_step(rank.model, stream));
    require_error(fsdp_prepare_replay(first.capture(), rank.rank == 0 ? 0.1 : 0.2, stream), FSDP_MISMATCH, {"gave lr", "0.1", "0.2"});
    FSDP(fsdp_discard_step(rank.model, stream));
    second.replay(0.1);
  });
}

TEST(Capture, EagerStepsAndReplaysMix) {
  const Scenario setup = graph_scenario(FSDP_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    const Stream other;
    pass(rank, stream, true);
    update(rank, stream, lr_of(0));
    Graph step(rank, stream, [&] {
      pass(rank, stream, true);
      update(rank, stream, 0);
    });
    step.replay(lr_of(1));
    pass(rank, other, true);  // comes after the graph without a word of the caller's
    update(rank, other, lr_of(2));
    step.replay(lr_of(3));
    step.replay(lr_of(4));
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

// Two captures, of a first and of a later micro-batch; the update is not captured, so that it can clip.
TEST(Capture, OverwritingAndAddingAreTwoCaptures) {
  for (const fsdp_strategy strategy : strategies) {
    const Scenario setup = graph_scenario(strategy);
    const auto clip_and_step = [](Rank &rank, cudaStream_t stream, int step) {
      double norm = 0;
      FSDP(fsdp_finish_grads(rank.model, 1.0, stream));
      FSDP(fsdp_clip_grads(rank.model, 0.5, stream, &norm));
      FSDP(fsdp_step_adamw(rank.model, lr_of(step), nullptr, stream));
    };
    const Weights expected = run(setup, [&](Rank &rank, cudaStream_t stream) {
      for (int step = 0; step < steps; ++step) {
        for (int i = 0; i < 3; ++i) pass(rank, stream, i == 2);
        clip_and_step(rank, stream, step);
      }
    });
    const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
      std::unique_ptr<Graph> first, later;
      for (int step = 0; step < steps; ++step) {
        if (!first) first = std::make_unique<Graph>(rank, stream, [&] { pass(rank, stream, false); });
        first->replay(0);
        if (!later) later = std::make_unique<Graph>(rank, stream, [&] { pass(rank, stream, false); });
        later->replay(0);
        pass(rank, stream, true);
        clip_and_step(rank, stream, step);
      }
    });
    EXPECT_TRUE(same_bits(weights, expected)) << "strategy " << strategy;
  }
}

// One group's forward and backward, with gather and reduce outside of the graph.
TEST(Capture, TheMathOfAGroupAloneIsCapturedWithItsGradients) {
  const Scenario setup = graph_scenario(FSDP_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    std::vector<std::unique_ptr<Graph>> math(rank.groups.size());
    for (int step = 0; step < steps; ++step) {
      for (fsdp_group *group : rank.groups) {
        FSDP(fsdp_unshard(group, FSDP_FORWARD, stream));
        FSDP(fsdp_reshard(group, FSDP_FORWARD, stream));
      }
      for (size_t g = rank.groups.size(); g-- > 0;) {
        FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, stream));
        if (!math[g])
          math[g] = std::make_unique<Graph>(rank, stream, [&] {
            for (size_t p = 0; p < rank.def(g).params.size(); ++p) enqueue_grad(rank, g, p, stream);
          });
        math[g]->replay(0);
        FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, stream));
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream));
      }
      update(rank, stream, lr_of(step));
    }
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

TEST(Capture, AReplayThatDoesNotFitIsRefusedAndHarmless) {
  const Scenario setup = graph_scenario(FSDP_OPTIM_GRADS_PARAMS);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    Graph step(rank, stream, [&] {
      pass(rank, stream, true);
      update(rank, stream, 0);
    });
    require_error(fsdp_commit_replay(step.capture(), stream), FSDP_INVALID_STATE, {"fsdp_prepare_replay before"});
    require_error(fsdp_prepare_replay(step.capture(), NAN, stream), FSDP_INVALID_ARGUMENT, {"lr is nan"});
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, stream));
    require_error(fsdp_prepare_replay(step.capture(), 0.1, stream), FSDP_INVALID_STATE,
                  {"not in the state in which capture 1 began", "'embed'"});
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, stream));
    FSDP(fsdp_begin_update(rank.model, stream));
    require_error(fsdp_prepare_replay(step.capture(), 0.1, stream), FSDP_INVALID_STATE, {"update window is open"});
    FSDP(fsdp_publish_weights(rank.model, stream));
    FSDP(fsdp_prepare_replay(step.capture(), 0.1, stream));
    require_error(fsdp_unshard(rank.groups[0], FSDP_FORWARD, stream), FSDP_INVALID_STATE, {"call fsdp_commit_replay first"});
    FSDP(fsdp_commit_replay(step.capture(), stream));
    step.replay(0.1);
  });
}

TEST(Capture, WhatCannotBePartOfAGraphIsRefused) {
  const Scenario setup = graph_scenario(FSDP_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    fsdp_capture *capture = nullptr;
    require_error(fsdp_capture_begin(rank.model, stream), FSDP_INVALID_STATE, {"cudaStreamBeginCapture"});
    require_error(fsdp_capture_end(rank.model, stream, &capture), FSDP_INVALID_STATE, {"fsdp_capture_begin first"});
    double norm = 0;
    float value = 0;
    Graph refused(rank, stream, [&] {
      require_error(fsdp_capture_begin(rank.model, stream), FSDP_INVALID_STATE, {"captured already"});
      pass(rank, stream, true);
      FSDP(fsdp_finish_grads(rank.model, 0.5, stream));
      require_error(fsdp_get_grad_norm(rank.model, stream, &norm), FSDP_INVALID_STATE, {"captured into a graph"});
      require_error(fsdp_read_param(rank.groups[0], 0, &value, FSDP_FLOAT32, rank.def(0).params[0].count()), FSDP_INVALID_STATE,
                    {"captured into a graph"});
      require_error(fsdp_discard_step(rank.model, stream), FSDP_INVALID_STATE, {"captured into a graph"});
      fsdp_adamw_options third = FSDP_ADAMW_OPTIONS_INIT;
      third.step = 3;
      require_error(fsdp_step_adamw(rank.model, 0.1, &third, stream), FSDP_INVALID_ARGUMENT, {"every replay is another step"});
      FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, stream));
    });
    for (int step = 0; step < steps; ++step) {  // as if nothing had been
      pass(rank, stream, true);
      update(rank, stream, lr_of(step));
    }
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

TEST(Capture, StagingInACaptureIsUnsupportedAndTheModelGoesOn) {
  const Scenario setup = graph_scenario(FSDP_OPTIM_GRADS_PARAMS, 2);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    FSDP(fsdp_capture_begin(rank.model, stream));
    require_error(fsdp_unshard(rank.groups[0], FSDP_FORWARD, stream), FSDP_UNSUPPORTED, {"cannot be part of a graph", "staging"});
    fsdp_capture *capture = nullptr;
    const fsdp_status ended = fsdp_capture_end(rank.model, stream, &capture);
    fsdp_destroy_capture(capture);
    (void)ended;  // whether CUDA can still end it is CUDA's
    cudaGraph_t recorded = nullptr;
    if (cudaStreamEndCapture(stream, &recorded) == cudaSuccess) cudaGraphDestroy(recorded);
    for (int step = 0; step < steps; ++step) {
      pass(rank, stream, true);
      update(rank, stream, lr_of(step));
    }
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

TEST(Capture, AModelMayEndBeforeItsCaptures) {
  const Scenario setup = graph_scenario(FSDP_OPTIM_GRADS_PARAMS);
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_local_contexts(1, &setup.context, &context));
  const Stream stream;
  fsdp_capture *capture = nullptr;
  {
    Rank rank(context, setup);
    rank.load();
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    FSDP(fsdp_capture_begin(rank.model, stream));
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, stream));
    FSDP(fsdp_capture_end(rank.model, stream, &capture));
    cudaGraph_t recorded = nullptr;
    CUDA(cudaStreamEndCapture(stream, &recorded));
    CUDA(cudaGraphDestroy(recorded));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    FSDP(fsdp_capture_begin(rank.model, stream));
  }
  cudaGraph_t unfinished = nullptr;
  if (cudaStreamEndCapture(stream, &unfinished) == cudaSuccess) cudaGraphDestroy(unfinished);
  require_error(fsdp_prepare_replay(capture, 0, stream), FSDP_INVALID_HANDLE, {"model of the capture was destroyed"});
  fsdp_destroy_capture(capture);
  require_error(fsdp_prepare_replay(capture, 0, stream), FSDP_INVALID_HANDLE, {"a destroyed handle"});
  fsdp_destroy_context(context);
}

TEST(Capture, TheHostHasNoGraphs) {
  Scenario setup = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 1, 0);
  setup.context.device = FSDP_DEVICE_HOST;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    require_error(fsdp_capture_begin(rank.model, nullptr), FSDP_UNSUPPORTED, {"host device has no graphs"});
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
