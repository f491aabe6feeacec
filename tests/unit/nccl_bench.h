// SPDX-License-Identifier: Apache-2.0
// Makes a collective that waits for peers, which may not come, and a graph that captures it.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "nccl_ranks.h"

namespace fsdp::transport::test {

inline bool has(const Error &error, const char *text) { return error.message.find(text) != std::string::npos; }

// Makes a collective of two ranks. The peer may not come.
struct Bench {
  explicit Bench(NcclRank &mine, uint64_t part_bytes = part)
      : bytes(part_bytes),
        rank(mine.rank()),
        stream(mine.device->create_stream("gather")),
        arena(mine.team->create_parts(bytes, "weights")),
        pool(mine.device->allocate(mine.size() * bytes, "pool")),
        communicator(mine.team->create_collectives("gather")) {}
  void gather() {
    const Gather span{Part::in(*arena, 0, bytes, rank), pool->data(), bytes};
    communicator->gather({&span, 1}, {1, "layer.3"}, *stream);
  }
  static constexpr uint64_t part = 4096;
  const uint64_t bytes;
  const uint32_t rank;
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<device::Memory> pool;
  std::unique_ptr<Collectives> communicator;
};

// Captures one gather of a rank in a graph.
class GatherGraph {
 public:
  GatherGraph(NcclRank &mine, Bench &bench) {
    const cudaStream_t stream = static_cast<cudaStream_t>(bench.stream->handle());
    EXPECT_EQ(cudaSetDevice(mine.device->index()), cudaSuccess);
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    mine.device->begin_capture(bench.stream->capture_id());
    bench.gather();
    mine.device->end_capture();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph_), cudaSuccess);
  }
  ~GatherGraph() { destroy(); }
  GatherGraph(const GatherGraph &) = delete;
  GatherGraph &operator=(const GatherGraph &) = delete;
  void destroy() {
    if (!graph_) return;
    EXPECT_EQ(cudaGraphDestroy(std::exchange(graph_, nullptr)), cudaSuccess);
  }

 private:
  cudaGraph_t graph_ = nullptr;
};

// The GPU's streams are free again within this time, whatever they waited for.
inline void expect_freed(NcclRank &mine, device::Stream &stream, double within) {
  const auto start = std::chrono::steady_clock::now();
  const auto event = mine.device->create_event();
  stream.record(*event);
  while (!event->done() && seconds_since(start) < 10) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_LT(seconds_since(start), within + 2);  // machines that run tests are loaded
}

}  // namespace fsdp::transport::test
