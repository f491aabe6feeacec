// SPDX-License-Identifier: Apache-2.0
// Replays that are under way while the model or the capture is destroyed, and replays whose graph does not end.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "graph.h"

using namespace harness;

namespace {

// A micro-batch behind the gate.
std::unique_ptr<Graph> capture_gated_pass(Rank &rank, cudaStream_t stream, Gate &gate) {
  return std::make_unique<Graph>(rank, stream, [&] {
    gate.enqueue(stream);
    pass(rank, stream, true);
  });
}

Scenario impatient_scenario() {
  Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  setup.context.timeout_ms = 3000;
  return setup;
}

using Body = std::function<void(Rank &, cudaStream_t, Gate &, Graph &)>;

// The body has a graph that ends when the gate is opened, which is at the latest when the body ends.
void run_gated(const Body &body) {
  const Scenario setup = impatient_scenario();
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Gate gate;
    const Stream stream;
    Rank rank(context, setup);
    rank.load();
    const auto graph = capture_gated_pass(rank, stream, gate);
    const std::unique_ptr<Gate, void (*)(Gate *)> last(&gate, [](Gate *own) { own->open(); });
    graph->replay(0);  // through the open gate
    update(rank, stream, 0.1);
    CUDA(cudaStreamSynchronize(stream));
    body(rank, stream, gate, *graph);
  });
}

TEST(ReplayEnd, AHostThatWaitsForAReplayWithoutEndIsToldWhichItIs) {
  run_gated([](Rank &rank, cudaStream_t stream, Gate &gate, Graph &graph) {
    gate.close();
    graph.replay(0);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream));
    double norm = 0;
    const double begin = now();
    require_error(fsdp_get_grad_norm(rank.model, nullptr, stream, &norm), FSDP_TIMEOUT,
                  {"3000 ms", "the replay of capture 1 has not ended"});
    EXPECT_LT(now() - begin, 10.0);
  });
}

// Nothing here waits for the GPU.
TEST(ReplayEnd, AMeetingFindsAReplayWithoutEnd) {
  run_gated([](Rank &rank, cudaStream_t stream, Gate &gate, Graph &graph) {
    gate.close();
    const double begin = now();
    graph.replay(0);
    update(rank, stream, 0.1);
    fsdp_status status = FSDP_OK;
    while (status == FSDP_OK && now() - begin < 15) {
      status = fsdp_begin_update(rank.model, stream);
      if (status == FSDP_OK) status = fsdp_publish_weights(rank.model, stream);
      pause_ms(100);  // not so often that the stream is full, where CUDA waits
    }
    require_error(status, FSDP_TIMEOUT, {"the replay of capture 1 has been on the GPU of rank 0 for 3000 ms"});
    EXPECT_GT(now() - begin, 2.9);
    fsdp_error error = FSDP_ERROR_INIT;
    FSDP(fsdp_get_context_error(rank.context, &error));
    EXPECT_EQ(error.status, FSDP_TIMEOUT);
  });
}

// The GPU has not come to the graph yet: slow is not stuck.
TEST(ReplayEnd, TimeBeforeTheGraphDoesNotCount) {
  run_gated([](Rank &rank, cudaStream_t stream, Gate &, Graph &graph) {
    Gate slow;
    slow.close();
    slow.enqueue(stream);
    graph.replay(0);
    update(rank, stream, 0.1);
    for (const double begin = now(); now() - begin < 4.5; pause_ms(150)) {
      FSDP(fsdp_begin_update(rank.model, stream));
      FSDP(fsdp_publish_weights(rank.model, stream));
    }
    slow.open();
    double one = 1;
    FSDP(fsdp_all_reduce_values(rank.context, nullptr, &one, 1, FSDP_VALUE_SUM));
    CUDA(cudaStreamSynchronize(stream));
    step(rank, stream, 0.1);
    FSDP(fsdp_close_context(rank.context));
  });
}

// There are more replays than the library keeps, so the host waits for the GPU, but no longer than the timeout.
TEST(ReplayEnd, TheHostIsAtMostSoManyReplaysAhead) {
  run_gated([](Rank &rank, cudaStream_t stream, Gate &gate, Graph &) {
    FSDP(fsdp_unshard(rank.groups[3], FSDP_BACKWARD, 0, stream));
    Gate later;
    Graph math(rank, stream, [&] { later.enqueue(stream); });
    for (int i = 0; i < 200; ++i) math.replay(0);
    CUDA(cudaStreamSynchronize(stream));
    gate.close();
    gate.enqueue(stream);  // before the graphs, so that no replay is stuck
    int count = 0;
    fsdp_status status = FSDP_OK;
    while (count < 200) {
      status = fsdp_prepare_replay(math.capture(), 0, stream);
      if (status != FSDP_OK) break;
      math.launch(stream);
      FSDP(fsdp_commit_replay(math.capture(), stream));
      ++count;
    }
    require_error(status, FSDP_TIMEOUT, {"3000 ms"});
    EXPECT_EQ(count, 64);
    gate.open();
  });
}

TEST(ReplayEnd, AReplayUnderWayIsInTheFlightRecord) {
  run_gated([](Rank &rank, cudaStream_t stream, Gate &gate, Graph &graph) {
    gate.close();
    graph.replay(0);
    const std::string path = testing::TempDir() + "replay-flight.json";
    FSDP(fsdp_write_flight_record(rank.context, path.c_str()));
    FILE *file = std::fopen(path.c_str(), "r");
    REQUIRE(file != nullptr);
    std::string text(1 << 20, 0);
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::fclose(file);
    std::remove(path.c_str());
    std::vector<std::string> lines;
    for (size_t at = text.find("replays of model"); at != std::string::npos;
         at = text.find("replays of model", at + 1)) {
      const size_t begin = text.rfind('\n', at) + 1;
      lines.push_back(text.substr(begin, text.find('\n', at) - begin));
    }
    REQUIRE(lines.size() == 2);
    for (const std::string &line : lines) EXPECT_NE(line.find("capture 1"), std::string::npos) << line;
    EXPECT_NE(lines[0].find("completed"), std::string::npos) << lines[0];
    EXPECT_NE(lines[1].find("started"), std::string::npos) << lines[1];
    gate.open();
    CUDA(cudaStreamSynchronize(stream));
    FSDP(fsdp_discard_step(rank.model, stream));
    FSDP(fsdp_close_context(rank.context));
  });
}

// The memory of the graph is given back after the graph has ended. committed: the library was told of the launch.
void expect_destroy_to_wait(bool committed) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  simulated::set_strict(true);  // that memory is given back does not wait for the GPU
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    const Stream stream;
    auto rank = std::make_unique<Rank>(context, setup);
    rank->load();
    const auto done = std::make_shared<std::atomic<bool>>(false);
    Gate gate;
    Graph graph(*rank, stream, [&] {
      gate.enqueue(stream);
      pass(*rank, stream, true);
      CUDA(simulated::enqueue(stream, [=] { *done = true; }));
    });
    gate.close();
    FSDP(fsdp_prepare_replay(graph.capture(), 0, stream));
    graph.launch(stream);
    if (committed) FSDP(fsdp_commit_replay(graph.capture(), stream));
    REQUIRE(!*done);
    std::thread opener([&gate] {
      pause_ms(300);
      gate.open();
    });
    rank.reset();
    EXPECT_TRUE(*done) << "the model was destroyed under its graph";
    opener.join();
  });
  simulated::set_strict(false);
}

TEST(ReplayEnd, AModelIsDestroyedAfterItsReplay) { expect_destroy_to_wait(true); }

TEST(ReplayEnd, AModelIsDestroyedAfterAReplayThatWasNotCommitted) { expect_destroy_to_wait(false); }

// A running graph no longer needs its capture. Destroying the capture cancels a prepared replay.
TEST(ReplayEnd, ACaptureMayGoWhileItsReplayIsUnderWay) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    fsdp_capture *capture = nullptr;
    for (int i = 0; i < steps; ++i) {
      begin_capture(rank, stream);
      step(rank, stream, 0);
      FSDP(fsdp_end_capture(rank.model, stream, &capture));
      cudaGraph_t recorded = nullptr;
      cudaGraphExec_t graph = nullptr;
      CUDA(cudaStreamEndCapture(stream, &recorded));
      CUDA(cudaGraphInstantiate(&graph, recorded, 0));
      CUDA(cudaGraphDestroy(recorded));
      FSDP(fsdp_prepare_replay(capture, lr_of(i), stream));
      CUDA(cudaGraphLaunch(graph, stream));
      FSDP(fsdp_commit_replay(capture, stream));
      fsdp_destroy_capture(capture);
      CUDA(cudaGraphExecDestroy(graph));
    }
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

}  // namespace
