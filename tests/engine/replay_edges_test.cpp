// SPDX-License-Identifier: Apache-2.0
// Each test checks one edge of a graph: what the graph comes after, or what comes after it, where nothing else orders
// them. docs/contracts/streams-and-threads.md lists the edges.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>

#include "graph.h"

using namespace harness;

namespace {

constexpr int late_ms = 60;

// What a kernel finds where the first weight of the group is.
void look(Rank &rank, size_t g, cudaStream_t stream, std::vector<float> &seen) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  FSDP(fsdp_get_param(rank.groups[g], 0, FSDP_EVAL, &view));
  seen.resize(view.element_count);
  CUDA(simulated::enqueue(stream,
                          [&seen, from = view.data] { std::memcpy(seen.data(), from, seen.size() * sizeof(float)); }));
}

// In debug mode a returned buffer is overwritten on the stream that gathers into it. No event follows, so only the
// order of that stream protects the buffer.
TEST(ReplayEdges, AGraphGathersAfterABufferWasOverwritten) {
  NEEDS_NCCL();
  Scenario setup = nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.context.flags = FSDP_CONTEXT_DEBUG;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    const size_t before = simulated::streams_of_this_thread().size();
    Rank rank(context, setup);
    const cudaStream_t gathers = simulated::streams_of_this_thread().at(before);
    const Stream stream;
    rank.load();
    std::vector<float> seen;
    const auto visit = [&](int ms) {
      FSDP(fsdp_unshard(rank.groups[1], FSDP_EVAL, 0, stream));
      nap(stream, ms);
      look(rank, 1, stream, seen);
      FSDP(fsdp_reshard(rank.groups[1], FSDP_EVAL, 0, stream));
    };
    {
      Graph graph(rank, stream, [&] { visit(4 * late_ms); });
      simulated::set_stream_delay(gathers, 10'000);
      visit(0);
      graph.replay(0);
      CUDA(cudaStreamSynchronize(stream));
      simulated::set_stream_delay(gathers, 0);
    }
    REQUIRE(seen == rank.read(1, 0));
    FSDP(fsdp_close_context(context));
  });
}

// The stream of the gather has nothing to do with the one that the graph is launched on.
TEST(ReplayEdges, AGatherComesAfterAGraphThatPublishes) {
  NEEDS_NCCL();
  run(nccl_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), [&](Rank &rank, cudaStream_t stream) {
    step(rank, stream, lr_of(0));
    const auto old = rank.read(1, 0);
    Graph graph(rank, stream, [&] {
      pass(rank, stream, true);
      nap(stream, late_ms);
      update(rank, stream, 0);
    });
    graph.replay(lr_of(1));
    const Stream other;
    std::vector<float> seen;
    FSDP(fsdp_unshard(rank.groups[1], FSDP_EVAL, 0, other));
    look(rank, 1, other, seen);
    FSDP(fsdp_reshard(rank.groups[1], FSDP_EVAL, 0, other));
    CUDA(cudaStreamSynchronize(other));
    const auto updated = rank.read(1, 0);
    REQUIRE(seen == updated && updated != old);
  });
}

// Both write the numbers of their step to the same place.
TEST(ReplayEdges, APreparationThatWasGivenUpComesBeforeTheNextOne) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  const auto train = [&](bool gives_up) {
    return run(setup, [&](Rank &rank, cudaStream_t stream) {
      const Stream other;
      Gate late, begin;
      Graph graph(rank, stream, [&] {
        begin.enqueue(stream);
        step(rank, stream, 0);
      });
      if (gives_up) {
        late.close();
        begin.close();
        late.enqueue(other);
        FSDP(fsdp_prepare_replay(graph.capture(), 100, other));
        FSDP(fsdp_cancel_replay(graph.capture(), other));
      }
      graph.replay(lr_of(0));
      late.open();
      CUDA(cudaStreamSynchronize(other));
      begin.open();
    });
  };
  EXPECT_TRUE(same_bits(train(true), train(false)));
}

// On a side stream of the capture, for which the update does not wait by itself. Gradients of zero change nothing.
TEST(ReplayEdges, AnUpdateComesAfterAScalingOnAnotherCapturedStream) {
  run(graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS), [&](Rank &rank, cudaStream_t stream) {
    const Stream side;
    Graph graph(rank, stream, [&] {
      pass(rank, stream, true);
      FSDP(fsdp_finish_grads(rank.model, 1, 0, stream));
      chain(stream, side);
      nap(side, late_ms);
      FSDP(fsdp_scale_grads(rank.model, 0, side));
      FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, stream));
      chain(side, stream);
    });
    const auto before = rank.read_all();
    graph.replay(0.1);
    REQUIRE(same_bits(rank.read_all(), before));
  });
}

}  // namespace
