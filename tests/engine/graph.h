// SPDX-License-Identifier: Apache-2.0
// Steps whose work is enqueued on streams, eagerly or as CUDA graphs: what the tests of captures and replays share.
// Over the simulated CUDA, whose captures have CUDA's rules for forks, joins and isolation.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "harness.h"
#include "simulated_cuda/simulated.h"

#define CUDA(call) harness::require((call) == cudaSuccess, #call)

namespace harness {

class Stream {
 public:
  explicit Stream(unsigned flags = cudaStreamNonBlocking) { CUDA(cudaStreamCreateWithFlags(&stream_, flags)); }
  ~Stream();
  Stream(const Stream &) = delete;
  Stream &operator=(const Stream &) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT: as CUDA's own

 private:
  cudaStream_t stream_ = nullptr;
};

// Orders later work on `later` after all work of `earlier` so far. One of the streams joins the capture of the other.
void chain(cudaStream_t earlier, cudaStream_t later);
// Delays later work on the stream by `ms`.
void nap(cudaStream_t stream, int ms);

// Work in a stream that ends when the test says so, or at the latest after a time that is longer than any timeout here.
class Gate {
 public:
  ~Gate() { open(); }
  void open() { *open_ = true; }
  void close() { *open_ = false; }
  void enqueue(cudaStream_t stream) {
    CUDA(simulated::enqueue(stream, [open = open_] {
      for (int i = 0; i < 30'000 && !*open; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }));
  }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(true);
};

// Captures the calls of `part` as a graph.
class Graph {
 public:
  Graph(Rank &rank, cudaStream_t stream, const std::function<void()> &part);
  ~Graph();
  Graph(const Graph &) = delete;
  Graph &operator=(const Graph &) = delete;

  void replay(double lr) { replay(lr, stream_); }
  void replay(double lr, cudaStream_t stream);
  void launch(cudaStream_t stream) { CUDA(cudaGraphLaunch(graph_, stream)); }
  fsdp_capture *capture() const { return capture_; }

 private:
  cudaStream_t stream_;
  fsdp_capture *capture_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

// Begins a capture that the test ends by hand, for captures that fail.
void begin_capture(Rank &rank, cudaStream_t stream);
// fsdp_end_capture must fail with all of the words. CUDA's capture ends too, its graph is dropped.
void end_spoilt_capture(Rank &rank, cudaStream_t stream, const std::vector<std::string> &words);
// Ends the capture and returns how many nodes it has.
size_t end_cuda_capture(cudaStream_t stream);

Scenario graph_scenario(fsdp_strategy strategy, uint32_t ranks = 1);  // ranks exchange by staging
Scenario nccl_scenario(fsdp_strategy strategy, uint32_t ranks);
bool has_nccl();  // FSDP_NCCL_LIBRARY names NCCL's look-alike
#define NEEDS_NCCL() \
  if (!harness::has_nccl()) GTEST_SKIP() << "FSDP_NCCL_LIBRARY names no NCCL"

// A gradient that depends on the weight at the time when the kernel runs.
void enqueue_grad(Rank &rank, size_t g, size_t p, cudaStream_t stream);
void enqueue_grads(Rank &rank, size_t g, cudaStream_t stream);
// A micro-batch.
void pass(Rank &rank, cudaStream_t stream, bool last);
void update(Rank &rank, cudaStream_t stream, double lr);
// A step of one micro-batch.
void step(Rank &rank, cudaStream_t stream, double lr);

constexpr int steps = 5;
double lr_of(int step);

using Weights = std::vector<std::vector<float>>;

// Makes the steps of `train` on every rank, and returns the weights of rank 0.
Weights run(const Scenario &setup, const std::function<void(Rank &, cudaStream_t)> &train, fsdp_stats *stats = nullptr);
Weights train_eagerly(const Scenario &setup, int passes, fsdp_stats *stats = nullptr);

}  // namespace harness
