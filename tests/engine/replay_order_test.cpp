// SPDX-License-Identifier: Apache-2.0
// What comes before a replay and what comes after it, on other streams than the graph's.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "graph.h"

using namespace harness;

namespace {

// A zero, which opens the buffer.
void acquire_first(Rank &rank, size_t g, cudaStream_t stream) {
  FSDP(fsdp_put_grad(rank.groups[g], 0, nullptr, FSDP_FLOAT32, 0, 0, stream));
}

// An operation whose result depends on what came before it.
void double_grads(Rank &rank, size_t g, cudaStream_t stream) {
  for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    FSDP(fsdp_acquire_grad(rank.groups[g], p, 0, stream, &grad, &accumulate));
    REQUIRE(accumulate == 1);
    CUDA(simulated::enqueue(stream, [to = static_cast<float *>(grad.data), count = grad.element_count] {
      for (uint64_t i = 0; i < count; ++i) to[i] *= 2;
    }));
  }
}

// A contribution that begins eagerly, goes on in a graph and ends eagerly, on different streams: each part comes after
// the one before, whichever stream the graph is launched on. forked: the eager stream takes part in the capture, too.
void contribute(Rank &rank, size_t g, const Stream &side, bool forked,
                const std::function<void(const std::function<void()> &)> &replay, cudaStream_t captured) {
  FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, 0, side));
  acquire_first(rank, g, side);
  nap(side, 10);
  enqueue_grads(rank, g, side);
  replay([&] {
    const cudaStream_t on = forked ? static_cast<cudaStream_t>(side) : captured;
    if (forked) chain(captured, side);
    nap(on, 2);
    enqueue_grads(rank, g, on);
    if (forked) chain(side, captured);
  });
  double_grads(rank, g, side);
  FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, 0, side));
  FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, side));
}

void expect_order_of_streams(const Scenario &setup, bool forked) {
  const auto train = [&](bool replays) {
    return run(setup, [&](Rank &rank, cudaStream_t stream) {
      const Stream captured, side;
      std::unique_ptr<Graph> graphs[4];
      for (int i = 0; i < steps; ++i) {
        for (size_t g = rank.groups.size(); g-- > 0;) {
          const auto replay = [&](const std::function<void()> &part) {
            if (!replays) {
              chain(side, captured);  // the eager math reads what was gathered for the other stream
              return part();
            }
            if (!graphs[g]) graphs[g] = std::make_unique<Graph>(rank, captured, part);
            const Stream launch;  // gone after the commit, while gradients are lent still
            graphs[g]->replay(0, launch);
          };
          contribute(rank, g, side, forked, replay, captured);
        }
        update(rank, stream, lr_of(i));
      }
      for (const Stream *own : {&captured, &side}) CUDA(cudaStreamSynchronize(*own));
    });
  };
  EXPECT_TRUE(same_bits(train(true), train(false))) << "strategy " << setup.model.strategy << ", forked " << forked;
}

TEST(Replay, WorkBeforeAndAfterAGraphIsOrderedOnEveryStream) {
  for (const fsdp_strategy strategy :
       {FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})  // with persistent gradients, and without
    for (const bool forked : {false, true}) expect_order_of_streams(graph_scenario(strategy), forked);
}

// All that a parameter's gradient has, on the stream: times and plus.
void change_grad(Rank &rank, cudaStream_t stream, float times, float plus) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(rank.groups[3], 0, 0, stream, &grad, &accumulate));
  CUDA(simulated::enqueue(stream, [=, to = static_cast<float *>(grad.data)] {
    for (uint64_t i = 0; i < grad.element_count; ++i) to[i] = to[i] * times + plus;
  }));
}

// More streams than the library has wrappers for.
TEST(Replay, WritesOfManyStreamsComeBeforeTheGraph) {
  float found = 0;
  run(graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS), [&](Rank &rank, cudaStream_t stream) {
    std::vector<std::unique_ptr<Stream>> streams(40);
    for (auto &own : streams) own = std::make_unique<Stream>();
    const auto write = [&] {
      acquire_first(rank, 3, *streams[0]);
      for (size_t i = 1; i <= 38; ++i) {
        if (i == 38) nap(*streams[i], 20);
        change_grad(rank, *streams[i], 1, 1);
      }
      nap(*streams[39], 20);
      change_grad(rank, *streams[39], 2, 0);
    };
    write();
    Graph graph(rank, stream, [&] { change_grad(rank, stream, 1, 1); });
    FSDP(fsdp_discard_step(rank.model, stream));
    write();
    graph.replay(0);
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    FSDP(fsdp_acquire_grad(rank.groups[3], 0, 0, *streams[1], &grad, &accumulate));
    CUDA(simulated::enqueue(*streams[1], [&found, from = static_cast<const float *>(grad.data)] { found = from[0]; }));
    CUDA(cudaStreamSynchronize(*streams[1]));
    FSDP(fsdp_discard_step(rank.model, stream));
  });
  EXPECT_EQ(found, 38 * 2 + 1);
}

// What waits behind a graph that has not ended fills the queues of its streams, and then CUDA makes the host wait.
uint64_t stream_commands() {
  uint64_t count = 0;
  for (const char *call : {"cudaEventRecord", "cudaStreamWaitEvent", "cuStreamWriteValue32"})
    count += simulated::calls(call);
  return count;
}

// A replay is launched on another stream than the previous one, which is still under way.
uint64_t count_replay_commands(uint32_t groups) {
  Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  setup.groups = equal_groups(groups, 8, 8);
  uint64_t count = 0;
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    const Stream other;
    Graph graph(rank, stream, [&] { step(rank, stream, 0); });
    {
      const simulated::Hold hold;
      graph.replay(0.1);
      const uint64_t before = stream_commands();
      graph.replay(0.1, other);
      count = stream_commands() - before;
    }
    CUDA(cudaStreamSynchronize(other));
  });
  return count;
}

TEST(Replay, TheCommandsAroundAGraphDoNotGrowWithTheGroups) {
  const uint64_t few = count_replay_commands(2);
  EXPECT_EQ(count_replay_commands(9), few);
  EXPECT_LT(few, 20u);
}

// Nothing is ordered behind its graph: the context has failed, and peers need not wait for their timeout.
TEST(Replay, FailedCommitIsReportedToPeers) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  std::atomic<bool> told{false};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    const Stream stream;
    rank.load();
    Graph math(rank, stream, [&] { change_grad(rank, stream, 1, 1); });
    FSDP(fsdp_prepare_replay(math.capture(), 0, stream));
    math.launch(stream);
    CUDA(cudaStreamSynchronize(stream));
    double one = 1;
    FSDP(fsdp_all_reduce_values(context, nullptr, &one, 1, FSDP_VALUE_SUM));
    const double begin = now();
    if (r == 1) {
      simulated::fail_call("cudaEventRecord", 1, cudaErrorLaunchOutOfResources);
      require_error(fsdp_commit_replay(math.capture(), stream), FSDP_SYSTEM, {"cudaEventRecord"});
      while (!told && now() - begin < 30) pause_ms(5);
    } else {
      require_error(fsdp_all_reduce_values(context, nullptr, &one, 1, FSDP_VALUE_SUM), FSDP_PEER_FAILED,
                    {"rank 1", "cudaEventRecord"});
      EXPECT_LT(now() - begin, 10.0) << "that is half the timeout";
      told = true;
    }
  });
}

}  // namespace
