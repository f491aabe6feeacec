// SPDX-License-Identifier: Apache-2.0
// Parts of steps that are captured as CUDA graphs have the bits and the counts of eager steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>

#include "graph.h"

using namespace harness;

namespace {

TEST(Capture, AWholeStepAsAGraphHasTheBitsAndTheCountsOfEagerSteps) {
  for (const fsdp_strategy strategy : strategies) {
    const Scenario setup = graph_scenario(strategy);
    fsdp_stats eager = FSDP_STATS_INIT, replayed = FSDP_STATS_INIT;
    const Weights expected = train_eagerly(setup, 2, &eager);
    const Weights weights = run(
        setup,
        [&](Rank &rank, cudaStream_t stream) {
          Graph graph(rank, stream, [&] {
            pass(rank, stream, false);
            pass(rank, stream, true);
            update(rank, stream, 123.0);  // no replay uses this rate
          });
          for (int i = 0; i < steps; ++i) graph.replay(lr_of(i));
        },
        &replayed);
    EXPECT_TRUE(same_bits(weights, expected)) << "strategy " << strategy;
    EXPECT_EQ(replayed.version, eager.version);
    EXPECT_EQ(replayed.reduces, eager.reduces);
    EXPECT_EQ(replayed.gathers, eager.gathers);
  }
}

// Gradients are reduced part by part: on one rank, and on two ranks whose reduces are in the graph too.
TEST(Capture, GradientsByPartsHaveTheBitsOfWholeGroups) {
  for (const uint32_t ranks : {1u, 2u}) {
    if (ranks > 1 && !has_nccl()) continue;
    const Scenario whole = ranks > 1 ? nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks)
                                     : graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
    Scenario setup = whole;
    setup.complete = true;
    // There is room for two parts that consist of 'l1.wide' alone.
    setup.model.max_pending_bytes = 16384;
    fsdp_stats eager = FSDP_STATS_INIT, replayed = FSDP_STATS_INIT;
    const Weights expected = train_eagerly(whole, 2), by_parts = train_eagerly(setup, 2, &eager);
    EXPECT_TRUE(same_bits(by_parts, expected)) << "ranks " << ranks;
    const Weights weights = run(
        setup,
        [&](Rank &rank, cudaStream_t stream) {
          pass(rank, stream, false);
          pass(rank, stream, true);
          update(rank, stream, lr_of(0));
          Graph graph(rank, stream, [&] {
            pass(rank, stream, false);
            pass(rank, stream, true);
            update(rank, stream, 0);
          });
          for (int i = 1; i < steps; ++i) graph.replay(lr_of(i));
        },
        &replayed);
    EXPECT_TRUE(same_bits(weights, expected)) << "ranks " << ranks;
    EXPECT_EQ(replayed.reduces, eager.reduces);
    EXPECT_EQ(replayed.reduce_scatters, eager.reduce_scatters);
  }
}

// The number of the step, which the random bits depend on, is written to the device before each replay.
TEST(Capture, WeightsAndStatesInFewerBitsHaveTheBitsOfEagerSteps) {
  for (const fsdp_main_storage storage : {FSDP_MAIN_FLOAT32, FSDP_MAIN_SPLIT16, FSDP_MAIN_NONE})
    for (const fsdp_optimizer optimizer : {FSDP_OPTIMIZER_ADAMW, FSDP_OPTIMIZER_ADAMW_8BIT}) {
      Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
      setup.set_dtype(FSDP_BFLOAT16);
      setup.groups[0].params.push_back({"coded", {70, 64}, FSDP_BFLOAT16});
      setup.model.main_storage = storage;
      setup.model.optimizer = optimizer;
      const Weights expected = train_eagerly(setup, 2);
      const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
        Graph graph(rank, stream, [&] {
          pass(rank, stream, false);
          pass(rank, stream, true);
          update(rank, stream, 123.0);  // no replay uses this rate
        });
        for (int i = 0; i < steps; ++i) graph.replay(lr_of(i));
      });
      EXPECT_TRUE(same_bits(weights, expected)) << storage << " " << optimizer;
    }
}

// The caller's update of some parameters is in the graph, and each replay publishes it.
TEST(Capture, ParametersOfTheCallersOptimizerHaveTheBitsOfEagerSteps) {
  for (const fsdp_optimizer optimizer : {FSDP_OPTIMIZER_ADAMW, FSDP_OPTIMIZER_ADAMW_8BIT}) {
    Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
    setup.set_dtype(FSDP_BFLOAT16);
    setup.groups[0].params.push_back({"coded", {70, 64}, FSDP_BFLOAT16});
    setup.groups[0].params.push_back({"own", {70, 64}, FSDP_BFLOAT16});
    for (ParamDef *const own : {&setup.groups[0].params[2], &setup.groups[1].params[0], &setup.groups[3].params[0]})
      own->optimizer = FSDP_OPTIMIZER_CALLER;
    setup.model.optimizer = optimizer;
    const Weights expected = train_eagerly(setup, 1);
    const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
      Graph graph(rank, stream, [&] { step(rank, stream, 123.0); });  // no replay uses this rate
      for (int i = 0; i < steps; ++i) graph.replay(lr_of(i));
    });
    EXPECT_TRUE(same_bits(weights, expected)) << optimizer;
  }
}

// Gathers and reduces are in the graph: NCCL's look-alike takes them as NCCL does.
TEST(Capture, RanksThatExchangeOverNcclCaptureTheirCollectives) {
  NEEDS_NCCL();
  for (const fsdp_strategy strategy : strategies) {
    const Scenario setup = nccl_scenario(strategy, 2);
    fsdp_stats eager = FSDP_STATS_INIT, replayed = FSDP_STATS_INIT;
    const Weights expected = train_eagerly(setup, 2, &eager);
    const Weights weights = run(
        setup,
        [&](Rank &rank, cudaStream_t stream) {
          pass(rank, stream, false);
          pass(rank, stream, true);
          update(rank, stream, lr_of(0));
          Graph graph(rank, stream, [&] {
            pass(rank, stream, false);
            pass(rank, stream, true);
            update(rank, stream, 0);
          });
          for (int i = 1; i < steps; ++i) graph.replay(lr_of(i));
        },
        &replayed);
    EXPECT_TRUE(same_bits(weights, expected)) << "strategy " << strategy;
    EXPECT_EQ(replayed.all_gathers, eager.all_gathers) << "strategy " << strategy;
    EXPECT_EQ(replayed.reduce_scatters + replayed.all_reduces, eager.reduce_scatters + eager.all_reduces);
  }
}

// Collectives of two meshes are in the graph: ranks 0 and 2 share the second group, and so do ranks 1 and 3.
TEST(Capture, RanksWithExpertsCaptureTheCollectivesOfBothMeshes) {
  NEEDS_NCCL();
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = nccl_scenario(strategy, 4);
    setup.groups[1].meshes = 2;
    const Weights expected = train_eagerly(setup, 2);
    const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
      pass(rank, stream, false);
      pass(rank, stream, true);
      update(rank, stream, lr_of(0));
      Graph graph(rank, stream, [&] {
        pass(rank, stream, false);
        pass(rank, stream, true);
        update(rank, stream, 0);
      });
      for (int i = 1; i < steps; ++i) graph.replay(lr_of(i));
    });
    EXPECT_TRUE(same_bits(weights, expected)) << "strategy " << strategy;
  }
}

void expect_outer_stats(const fsdp_stats &found, const fsdp_stats &expected, const std::string &what) {
  EXPECT_EQ(found.outer_all_reduces, expected.outer_all_reduces) << what;
  EXPECT_EQ(found.outer_reduce_scatters, expected.outer_reduce_scatters) << what;
  EXPECT_EQ(found.outer_all_gathers, expected.outer_all_gathers) << what;
  EXPECT_EQ(found.outer_sent_bytes, expected.outer_sent_bytes) << what;
}

// The outer axis has counters and buffers of its own. A second capture shows what the first one leaves behind.
TEST(Capture, ReplicasCaptureTheirOuterAxisToo) {
  NEEDS_NCCL();
  for (const fsdp_strategy strategy : strategies)
    for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM}) {
      const std::string what = "strategy " + std::to_string(strategy) + ", outer " + std::to_string(outer);
      Scenario setup = nccl_scenario(strategy, 4);
      setup.mesh.replicate_size = setup.mesh.shard_size = 2;
      setup.model.outer_strategy = outer;
      fsdp_stats eager = FSDP_STATS_INIT, replayed = FSDP_STATS_INIT;
      const Weights expected = train_eagerly(setup, 1, &eager);
      const Weights weights = run(
          setup,
          [&](Rank &rank, cudaStream_t stream) {
            step(rank, stream, lr_of(0));
            const fsdp_stats before = rank.stats();
            Graph unused(rank, stream, [&] { step(rank, stream, 0); });
            Graph graph(rank, stream, [&] { step(rank, stream, 0); });
            if (rank.rank == 0) expect_outer_stats(rank.stats(), before, what + ", after a capture");
            graph.replay(lr_of(1));
            step(rank, stream, lr_of(2));
            graph.replay(lr_of(3));
            graph.replay(lr_of(4));
          },
          &replayed);
      EXPECT_TRUE(same_bits(weights, expected)) << what;
      expect_outer_stats(replayed, eager, what);
    }
}

// Amaxes travel in the graph, over one axis and over two, and each replay has scales of its own.
TEST(Capture, ScalesOfAllRanksAreCaptured) {
  NEEDS_NCCL();
  for (const uint32_t ranks : {2u, 4u}) {
    Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    for (GroupDef &group : setup.groups)
      for (ParamDef &param : group.params)
        if (!(param.flags & FSDP_PARAM_FROZEN)) param.quantization = FSDP_QUANTIZE_FP8;
    if (ranks == 4) setup.mesh.replicate_size = setup.mesh.shard_size = 2;
    if (ranks == 4) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
    const Weights expected = train_eagerly(setup, 1);
    const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
      step(rank, stream, lr_of(0));
      Graph graph(rank, stream, [&] { step(rank, stream, 0); });
      for (int i = 1; i < steps; ++i) graph.replay(lr_of(i));
    });
    EXPECT_TRUE(same_bits(weights, expected)) << ranks << " ranks";
  }
}

TEST(Capture, EagerStepsAndReplaysMix) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    const Stream other;
    step(rank, stream, lr_of(0));
    Graph graph(rank, stream, [&] { step(rank, stream, 0); });
    graph.replay(lr_of(1));
    step(rank, other, lr_of(2));  // comes after the graph, although the caller does not order it
    graph.replay(lr_of(3));
    graph.replay(lr_of(4));
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

// Two captures, of a first and of a later micro-batch; the update is not captured.
TEST(Capture, OverwritingAndAddingAreTwoCaptures) {
  for (const fsdp_strategy strategy : strategies) {
    const Scenario setup = graph_scenario(strategy);
    const auto clip_and_step = [](Rank &rank, cudaStream_t stream, int i) {
      double norm = 0;
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream));
      FSDP(fsdp_clip_grads(rank.model, nullptr, 0.5, stream, &norm));
      FSDP(fsdp_step_adamw(rank.model, lr_of(i), nullptr, stream));
    };
    const Weights expected = run(setup, [&](Rank &rank, cudaStream_t stream) {
      for (int i = 0; i < steps; ++i) {
        for (int k = 0; k < 3; ++k) pass(rank, stream, k == 2);
        clip_and_step(rank, stream, i);
      }
    });
    const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
      std::unique_ptr<Graph> first, later;
      for (int i = 0; i < steps; ++i) {
        if (!first) first = std::make_unique<Graph>(rank, stream, [&] { pass(rank, stream, false); });
        first->replay(0);
        if (!later) later = std::make_unique<Graph>(rank, stream, [&] { pass(rank, stream, false); });
        later->replay(0);
        pass(rank, stream, true);
        clip_and_step(rank, stream, i);
      }
    });
    EXPECT_TRUE(same_bits(weights, expected)) << "strategy " << strategy;
  }
}

void end_groups_and_update(Rank &rank, cudaStream_t stream, double lr) {
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.weight_decay = 0.1;
  FSDP(fsdp_finish_grads(rank.model, 0.5, FSDP_LAST, stream));
  FSDP(fsdp_step_adamw(rank.model, lr, &options, stream));
}

// Contributions end in fsdp_finish_grads: all of the step is in one graph, each piece is in a graph of its own, or the
// end runs eagerly after graphs.
void expect_late_ends(const Scenario &setup) {
  const Weights expected = train_eagerly(setup, 2);
  const auto both = [](Rank &rank, cudaStream_t stream) { pass(rank, stream, false), pass(rank, stream, false); };
  const Weights whole = run(setup, [&](Rank &rank, cudaStream_t stream) {
    Graph graph(rank, stream, [&] { both(rank, stream), end_groups_and_update(rank, stream, 0); });
    for (int i = 0; i < steps; ++i) graph.replay(lr_of(i));
  });
  EXPECT_TRUE(same_bits(whole, expected)) << "the whole step";
  for (const bool captured : {false, true}) {
    const Weights pieces = run(setup, [&](Rank &rank, cudaStream_t stream) {
      std::unique_ptr<Graph> first, later, end;
      for (int i = 0; i < steps; ++i) {
        if (!first) first = std::make_unique<Graph>(rank, stream, [&] { pass(rank, stream, false); });
        first->replay(0);
        if (!later) later = std::make_unique<Graph>(rank, stream, [&] { pass(rank, stream, false); });
        later->replay(0);
        if (!captured) {
          end_groups_and_update(rank, stream, lr_of(i));
          continue;
        }
        if (!end) end = std::make_unique<Graph>(rank, stream, [&] { end_groups_and_update(rank, stream, 0); });
        end->replay(lr_of(i));
      }
    });
    EXPECT_TRUE(same_bits(pieces, expected)) << "in pieces, end captured: " << captured;
  }
  const Weights mixed = run(setup, [&](Rank &rank, cudaStream_t stream) {
    std::unique_ptr<Graph> end;
    for (int i = 0; i < steps; ++i) {
      nap(stream, 10);
      both(rank, stream);
      if (!end) end = std::make_unique<Graph>(rank, stream, [&] { end_groups_and_update(rank, stream, 0); });
      end->replay(lr_of(i));
    }
  });
  EXPECT_TRUE(same_bits(mixed, expected)) << "the end alone";
  const Weights eager = run(setup, [&](Rank &rank, cudaStream_t stream) {
    for (int i = 0; i < steps; ++i) {
      if (setup.ranks <= 2) {
        const Stream writer;  // destroyed before the step ends
        chain(stream, writer);
        nap(writer, 10);
        both(rank, writer);
      } else {  // more streams than the GPU has queues for: work of one rank may lie behind another's that waits for it
        both(rank, stream);
      }
      end_groups_and_update(rank, stream, lr_of(i));
    }
  });
  EXPECT_TRUE(same_bits(eager, expected)) << "without a graph";
}

TEST(Capture, MayEndTheGroupsOfAStep) {
  for (const fsdp_strategy strategy : strategies) {
    SCOPED_TRACE(strategy);
    expect_late_ends(graph_scenario(strategy));
  }
}

TEST(Capture, MayEndTheGroupsOfAStepOverTwoAxes) {
  NEEDS_NCCL();
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
    SCOPED_TRACE(strategy);
    for (const uint32_t shards : {1u, 2u}) {
      Scenario setup = nccl_scenario(strategy, 2 * shards);
      setup.mesh.replicate_size = 2;
      setup.mesh.shard_size = shards;
      expect_late_ends(setup);
    }
  }
}

// Each replay finds its norm anew; some norms are above the limit and some below. The host asks for the norm of the
// last replay, or of the eager step after it.
void expect_clips(const Scenario &setup, const std::function<void(Rank &, cudaStream_t, double)> &clipped_step) {
  std::vector<double> eager, replayed;
  const auto ask = [](Rank &rank, std::vector<double> &norms) {
    double norm = 0;
    FSDP(fsdp_get_last_norm(rank.model, &norm));
    if (rank.rank == 0) norms.push_back(norm);
  };
  const Weights expected = run(setup, [&](Rank &rank, cudaStream_t stream) {
    for (int i = 0; i < steps; ++i) clipped_step(rank, stream, lr_of(i)), ask(rank, eager);
  });
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    const auto captured = [&] { clipped_step(rank, stream, 0); };
    const Graph unused(rank, stream, captured);
    double none = 0;  // no norm was measured
    require_error(fsdp_get_last_norm(rank.model, &none), FSDP_INVALID_STATE, {"no norm was measured yet"});
    clipped_step(rank, stream, lr_of(0));
    Graph graph(rank, stream, captured);
    ask(rank, replayed);
    for (int i = 1; i < steps; ++i) {
      nap(stream, 20);
      i == 2 ? clipped_step(rank, stream, lr_of(i)) : graph.replay(lr_of(i));
      ask(rank, replayed);
    }
  });
  EXPECT_TRUE(same_bits(weights, expected));
  EXPECT_EQ(replayed, eager);
  EXPECT_NE(eager.front(), eager.back());
}

TEST(Capture, ClippingIsPartOfAGraph) {
  const auto clipped_step = [](Rank &rank, cudaStream_t stream, double lr) {
    pass(rank, stream, true);
    FSDP(fsdp_finish_grads(rank.model, 0.5, 0, stream));
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream, nullptr));
    FSDP(fsdp_clip_grads(rank.model, nullptr, 0.25, stream, nullptr));
    FSDP(fsdp_step_adamw(rank.model, lr, nullptr, stream));
  };
  expect_clips(graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS), clipped_step);
  if (!has_nccl()) return;
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    expect_clips(nccl_scenario(strategy, 2), clipped_step);
  Scenario replicas = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
  replicas.mesh.replicate_size = replicas.mesh.shard_size = 2;
  replicas.model.outer_strategy = FSDP_OUTER_OPTIM;
  expect_clips(replicas, clipped_step);
}

// Each step, also one that a graph does, has other gradients.
TEST(Capture, AWholeStepInOneCallMayClip) {
  NEEDS_NCCL();
  const Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  std::vector<uint64_t> counts;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params)
      if (!(param.flags & FSDP_PARAM_FROZEN)) counts.push_back(param.count());
  const uint64_t most = *std::ranges::max_element(counts);
  std::array<float *, 2> given{};
  for (float *&grad : given) CUDA(cudaHostAlloc(reinterpret_cast<void **>(&grad), most * sizeof(float), 0));
  std::array<std::atomic<int>, 2> done{};
  expect_clips(setup, [&](Rank &rank, cudaStream_t stream, double lr) {
    float *const grad = given[rank.rank];
    CUDA(simulated::enqueue(stream, [=, &calls = done[rank.rank]] {
      const auto factor = 0.01f * static_cast<float>(1 + calls++ % steps);
      for (uint64_t i = 0; i < most; ++i) grad[i] = factor * static_cast<float>(i % 5);
    }));
    std::vector<fsdp_grad> grads;
    for (const uint64_t count : counts) grads.push_back({grad, count, FSDP_FLOAT32, 0});
    FSDP(fsdp_apply_grads(rank.model, grads.data(), grads.size(), sizeof(fsdp_grad), lr, 0.25, nullptr, stream,
                          nullptr));
  });
  for (float *grad : given) CUDA(cudaFreeHost(grad));
}

// A stream of the caller's that was forked into the capture is a part of it.
TEST(Capture, AForkedStreamIsPartOfTheCapture) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    const Stream side;
    Graph graph(rank, stream, [&] {
      chain(stream, side);
      pass(rank, side, true);
      chain(side, stream);
      update(rank, stream, 0);
    });
    for (int i = 0; i < steps; ++i) graph.replay(lr_of(i));
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

TEST(Capture, AModelMayEndBeforeItsCaptures) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_local_contexts(1, &setup.context, &context));
  const Stream stream;
  fsdp_capture *capture = nullptr;
  {
    Rank rank(context, setup);
    rank.load();
    begin_capture(rank, stream);
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream));
    FSDP(fsdp_end_capture(rank.model, stream, &capture));
    end_cuda_capture(stream);
    begin_capture(rank, stream);
  }
  cudaGraph_t unfinished = nullptr;
  if (cudaStreamEndCapture(stream, &unfinished) == cudaSuccess) cudaGraphDestroy(unfinished);
  require_error(fsdp_prepare_replay(capture, 0, stream), FSDP_INVALID_HANDLE, {"model of the capture was destroyed"});
  fsdp_destroy_capture(capture);
  require_error(fsdp_prepare_replay(capture, 0, stream), FSDP_INVALID_HANDLE, {"a destroyed handle"});
  // The context can be captured from again.
  Rank rank(context, setup);
  rank.load();
  Graph graph(rank, stream, [&] { step(rank, stream, 0); });
  graph.replay(0.1);
  CUDA(cudaStreamSynchronize(stream));
  fsdp_destroy_context(context);
}

TEST(Capture, TheHostHasNoGraphs) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1, 0);
  setup.context.device = FSDP_DEVICE_HOST;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    require_error(fsdp_begin_capture(rank.model, nullptr), FSDP_UNSUPPORTED, {"host device has no graphs"});
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
