// SPDX-License-Identifier: Apache-2.0
// Before a replay: the state that must be the same on every rank, and replays that are cancelled.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "graph.h"

using namespace harness;

namespace {

TEST(Replay, ReplayThatDoesNotFitIsRefusedAndChangesNothing) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    Graph graph(rank, stream, [&] { step(rank, stream, 0); });
    require_error(fsdp_commit_replay(graph.capture(), stream), FSDP_INVALID_STATE,
                  {"fsdp_commit_replay", "fsdp_prepare_replay before"});
    require_error(fsdp_prepare_replay(graph.capture(), NAN, stream), FSDP_INVALID_ARGUMENT, {"lr is nan"});
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream));
    require_error(fsdp_prepare_replay(graph.capture(), 0.1, stream), FSDP_INVALID_STATE,
                  {"rank 0", "not in the state in which capture 1 began", "'embed'"});
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, stream));
    FSDP(fsdp_begin_update(rank.model, stream));
    require_error(fsdp_prepare_replay(graph.capture(), 0.1, stream), FSDP_INVALID_STATE, {"update window is open"});
    FSDP(fsdp_publish_weights(rank.model, stream));
    FSDP(fsdp_prepare_replay(graph.capture(), 0.1, stream));
    require_error(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream), FSDP_INVALID_STATE,
                  {"fsdp_unshard", "a replay of capture 1 was prepared", "fsdp_commit_replay", "fsdp_cancel_replay"});
    require_error(
        fsdp_close_context(rank.context), FSDP_INVALID_STATE,
        {"fsdp_close_context", "a replay of capture 1 was prepared", "fsdp_commit_replay", "fsdp_cancel_replay"});
    FSDP(fsdp_commit_replay(graph.capture(), stream));
    graph.replay(0.1);
  });
}

TEST(Replay, CommitNeedsTheStreamOfThePreparation) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    const Stream other;
    Graph graph(rank, stream, [&] { step(rank, stream, 0); });
    Graph never(rank, stream, [&] { step(rank, stream, 0); });
    for (int i = 0; i < steps; ++i) {
      FSDP(fsdp_prepare_replay(graph.capture(), lr_of(i), other));
      require_error(fsdp_commit_replay(graph.capture(), stream), FSDP_INVALID_ARGUMENT,
                    {"fsdp_commit_replay", "fsdp_prepare_replay was given"});
      require_error(fsdp_cancel_replay(graph.capture(), stream), FSDP_INVALID_ARGUMENT,
                    {"fsdp_cancel_replay", "fsdp_prepare_replay was given"});
      require_error(fsdp_commit_replay(never.capture(), other), FSDP_INVALID_STATE,
                    {"no replay of this capture was prepared"});
      require_error(fsdp_cancel_replay(never.capture(), other), FSDP_INVALID_STATE,
                    {"fsdp_cancel_replay", "no replay of this capture was prepared"});
      graph.launch(other);
      FSDP(fsdp_commit_replay(graph.capture(), other));
    }
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

// Work that a preparation enqueued on its stream must not come after work that the next one enqueues on another stream.
TEST(Replay, CancelledReplayChangesNothing) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  fsdp_stats eager = FSDP_STATS_INIT, replayed = FSDP_STATS_INIT;
  const Weights expected = train_eagerly(setup, 1, &eager);
  const Weights weights = run(
      setup,
      [&](Rank &rank, cudaStream_t stream) {
        const Stream other;
        Graph graph(rank, stream, [&] { step(rank, stream, 0); });
        auto second = std::make_unique<Graph>(rank, stream, [&] { step(rank, stream, 0); });
        for (int i = 0; i < steps; ++i) {
          const bool last = i + 1 == steps;
          FSDP(fsdp_prepare_replay(last ? second->capture() : graph.capture(), 100, other));
          if (last)
            second.reset();  // gives it up as well
          else
            FSDP(fsdp_cancel_replay(graph.capture(), other));
          if (i % 2 == 0)
            graph.replay(lr_of(i));
          else
            step(rank, stream, lr_of(i));
        }
      },
      &replayed);
  EXPECT_TRUE(same_bits(weights, expected));
  EXPECT_EQ(replayed.version, eager.version);
  EXPECT_EQ(replayed.reduces, eager.reduces);
}

TEST(Replay, DifferentGraphsOnRanksAreReportedBeforeTheyRun) {
  NEEDS_NCCL();
  run(nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), [&](Rank &rank, cudaStream_t stream) {
    step(rank, stream, 0.1);
    Graph first(rank, stream, [&] { step(rank, stream, 0); }), second(rank, stream, [&] { step(rank, stream, 0); });
    Graph &own = rank.rank == 0 ? first : second;
    require_error(fsdp_prepare_replay(own.capture(), 0.1, stream), FSDP_MISMATCH,
                  {"replayed capture 1", "replayed capture 2"});
    require_error(fsdp_prepare_replay(first.capture(), rank.rank == 0 ? 0.1 : 0.2, stream), FSDP_MISMATCH,
                  {"gave lr", "0.1", "0.2"});
    second.replay(0.1);  // nothing was done, so nothing must be discarded
    FSDP(fsdp_discard_step(rank.model, stream));
  });
}

// The graph has the step's spans by lr_scale: it is of use where these are what they were.
TEST(Replay, NeedsTheLrScalesOfTheCapture) {
  NEEDS_NCCL();
  run(nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), [&](Rank &rank, cudaStream_t stream) {
    step(rank, stream, 0.1);
    Graph graph(rank, stream, [&] { step(rank, stream, 0); });
    FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, 0.25));
    require_error(fsdp_prepare_replay(graph.capture(), 0.1, stream), FSDP_INVALID_STATE,
                  {"an lr_scale was changed after capture 1"});
    FSDP(fsdp_set_param_lr_scale(rank.groups[0], 0, 1));
    graph.replay(0.1);
    FSDP(fsdp_discard_step(rank.model, stream));
  });
}

void step_without(Rank &rank, cudaStream_t stream, double lr, uint64_t untrained) {
  for (size_t g = rank.groups.size(); g-- > 0;) {
    FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, 0, stream));
    for (size_t p = g == 1 ? untrained : 0; p < rank.def(g).params.size(); ++p) enqueue_grad(rank, g, p, stream);
    FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, 0, stream));
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream));
  }
  update(rank, stream, lr);
}

// A graph has the reduces and the spans of what was trained: one parameter of a group less, or the whole group.
TEST(Replay, NeedsTheTrainedParametersOfTheCapture) {
  NEEDS_NCCL();
  for (const bool whole : {false, true}) {
    const Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    const uint64_t count = whole ? setup.groups[1].params.size() : 1;
    const auto train = [&](Rank &rank, bool trained) {
      for (uint64_t p = 0; p < count; ++p) FSDP(fsdp_set_param_trainable(rank.groups[1], p, trained));
    };
    const Weights expected = run(setup, [&](Rank &rank, cudaStream_t stream) {
      for (int i = 0; i < steps; ++i) {
        train(rank, i % 2 == 0);
        step_without(rank, stream, lr_of(i), i % 2 == 0 ? 0 : count);
      }
    });
    const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
      Graph all(rank, stream, [&] { step_without(rank, stream, 0, 0); });
      train(rank, false);
      Graph fewer(rank, stream, [&] { step_without(rank, stream, 0, count); });
      for (int i = 0; i < steps; ++i) {
        train(rank, i % 2 == 0);
        require_error(fsdp_prepare_replay((i % 2 == 0 ? fewer : all).capture(), lr_of(i), stream), FSDP_INVALID_STATE,
                      {"other parameters are trained than in capture", i % 2 == 0 ? "2" : "1", "capture again"});
        (i % 2 == 0 ? all : fewer).replay(lr_of(i));
      }
    });
    EXPECT_TRUE(same_bits(weights, expected)) << whole;
  }
}

// Replicas share no gathers and no reduces of the inner axis: the meeting compares their captures themselves.
TEST(Replay, DifferentGraphsOnReplicasAreReported) {
  NEEDS_NCCL();
  Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.mesh.replicate_size = 2;
  setup.mesh.shard_size = 1;
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    step(rank, stream, 0.1);
    Graph first(rank, stream, [&] { step(rank, stream, 0); }), second(rank, stream, [&] { step(rank, stream, 0); });
    Graph &own = rank.rank == 0 ? first : second;
    require_error(fsdp_prepare_replay(own.capture(), 0.1, stream), FSDP_MISMATCH,
                  {"replayed capture 1", "replayed capture 2"});
    second.replay(0.1);
  });
}

TEST(Replay, CaptureOfACallThatAnotherRankMakesIsReported) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    const Stream stream;
    if (r == 1) begin_capture(rank, stream);
    require_error(fsdp_publish_weights(rank.model, stream), FSDP_MISMATCH,
                  {"fsdp_publish_weights", "is in capture 1", "is in no capture"});
  });
}

// The math of one group: gathers and reduces stay outside, so that the ranks may exchange by staging.
std::unique_ptr<Graph> capture_math(Rank &rank, size_t g, cudaStream_t stream) {
  return std::make_unique<Graph>(rank, stream, [&] { enqueue_grads(rank, g, stream); });
}

TEST(Replay, RankThatCannotReplayIsNamedOnAllRanks) {
  Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    fsdp_group *head = rank.groups[3];
    FSDP(fsdp_unshard(head, FSDP_BACKWARD, 0, stream));
    const auto math = capture_math(rank, 3, stream);
    const auto expect_refused = [&](const std::vector<std::string> &words) {
      const double begin = now();
      require_error(fsdp_prepare_replay(math->capture(), 0, stream), FSDP_INVALID_STATE, words);
      EXPECT_LT(now() - begin, 10.0) << "that is half the timeout";
    };
    if (rank.rank == 1) FSDP(fsdp_unshard(head, FSDP_RECOMPUTE, 0, stream));
    expect_refused({"fsdp_prepare_replay", "rank 1: the model is not in the state in which capture 1 began",
                    "'head' has 2 holds"});
    if (rank.rank == 1) FSDP(fsdp_reshard(head, FSDP_RECOMPUTE, 0, stream));
    // As many holds as then, but of a piece.
    const auto exchange_hold = [&](auto take, auto give_back) {
      if (rank.rank == 1) take(), give_back();
    };
    exchange_hold([&] { FSDP(fsdp_unshard_piece(head, 0, FSDP_BACKWARD, 0, stream)); },
                  [&] { FSDP(fsdp_reshard(head, FSDP_BACKWARD, 0, stream)); });
    expect_refused({"rank 1", "'head' has 0 holds and 1 of a piece, and had 1 and 0 then"});
    exchange_hold([&] { FSDP(fsdp_unshard(head, FSDP_BACKWARD, 0, stream)); },
                  [&] { FSDP(fsdp_reshard_piece(head, 0, FSDP_BACKWARD, 0, stream)); });
    const Stream captured;  // of the program's own
    if (rank.rank == 0) CUDA(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal));
    require_error(fsdp_prepare_replay(math->capture(), 0, rank.rank == 0 ? captured : stream), FSDP_INVALID_STATE,
                  {"rank 0", "is being captured into a graph, and the model is not"});
    if (rank.rank == 0) REQUIRE(end_cuda_capture(captured) == 0);
    math->replay(0);
    FSDP(fsdp_reshard(head, FSDP_BACKWARD, 0, stream));
    FSDP(fsdp_reduce_grad(head, 0, stream));
    FSDP(fsdp_discard_step(rank.model, stream));
    step(rank, stream, 0.1);
  });
}

TEST(Replay, RankWithAFailedStepIsNamedOnAllRanks) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    FSDP(fsdp_unshard(rank.groups[3], FSDP_BACKWARD, 0, stream));
    const auto math = capture_math(rank, 3, stream);
    require_error(fsdp_finish_grads(rank.model, 1, 0, stream), FSDP_INVALID_STATE, {"'head' is still held"});
    require_error(fsdp_prepare_replay(math->capture(), 0, stream), FSDP_INVALID_STATE,
                  {"rank 0: this step has failed", "rank 1: this step has failed", "fsdp_discard_step"});
    FSDP(fsdp_discard_step(rank.model, stream));
    step(rank, stream, 0.1);
  });
}

// One rank launches and the other one cancels, so from then on they do different things.
TEST(Replay, CancelOnSomeRanksOnlyIsReportedAtTheNextMeeting) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    FSDP(fsdp_unshard(rank.groups[3], FSDP_BACKWARD, 0, stream));
    const auto math = capture_math(rank, 3, stream);
    FSDP(fsdp_prepare_replay(math->capture(), 0, stream));
    if (rank.rank == 0) {
      math->launch(stream);
      FSDP(fsdp_commit_replay(math->capture(), stream));
    } else {
      FSDP(fsdp_cancel_replay(math->capture(), stream));
    }
    require_error(fsdp_begin_update(rank.model, stream), FSDP_MISMATCH,
                  {"rank 0 nothing more", "rank 1 gave up the replay of capture 1"});
    FSDP(fsdp_discard_step(rank.model, stream));
    step(rank, stream, 0.1);
  });
}

}  // namespace
