// SPDX-License-Identifier: Apache-2.0
// What comes before a replay and what comes after it, on other streams than the graph's.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>

#include "graph.h"

using namespace harness;

namespace {

void nap(cudaStream_t stream, int ms) {
  CUDA(simulated::enqueue(stream, [ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }));
}

// A zero, which opens the buffer.
void acquire_first(Rank &rank, size_t g, cudaStream_t stream) {
  FSDP(fsdp_put_grad(rank.groups[g], 0, nullptr, FSDP_FLOAT32, 0, stream));
}

// What it comes after makes a difference.
void double_grads(Rank &rank, size_t g, cudaStream_t stream) {
  for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    FSDP(fsdp_acquire_grad(rank.groups[g], p, stream, &grad, &accumulate));
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
  FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, side));
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
  FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, side));
  FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, side));
}

void expect_order_of_streams(const Scenario &setup, bool forked) {
  const auto train = [&](bool replays) {
    return run(setup, [&](Rank &rank, cudaStream_t stream) {
      const Stream captured, launch, side;
      std::unique_ptr<Graph> graphs[4];
      for (int i = 0; i < steps; ++i) {
        for (size_t g = rank.groups.size(); g-- > 0;) {
          const auto replay = [&](const std::function<void()> &part) {
            if (!replays) {
              chain(side, captured);  // the eager math reads what was gathered for the other stream
              return part();
            }
            if (!graphs[g]) graphs[g] = std::make_unique<Graph>(rank, captured, part);
            graphs[g]->replay(0, launch);
          };
          contribute(rank, g, side, forked, replay, captured);
        }
        update(rank, stream, lr_of(i));
      }
      for (const Stream *own : {&captured, &launch, &side}) CUDA(cudaStreamSynchronize(*own));
    });
  };
  EXPECT_TRUE(same_bits(train(true), train(false))) << "strategy " << setup.model.strategy << ", forked " << forked;
}

TEST(Replay, WhatComesBeforeAndAfterIsOrderedOnEveryStream) {
  for (const fsdp_strategy strategy : strategies)
    for (const bool forked : {false, true}) expect_order_of_streams(graph_scenario(strategy), forked);
}

}  // namespace
