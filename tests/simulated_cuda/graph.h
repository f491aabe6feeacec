// SPDX-License-Identifier: Apache-2.0
// Capture builds a graph, and a launch runs it.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "simulated_cuda/stream.h"

namespace simulated {

struct Node {
  std::function<void()> run;
  std::vector<Node *> after;
  size_t lane;   // index of the captured stream
  size_t index;  // index in the graph; the node comes after nodes with lower indices
  cudaGraphNodeType type;
};

struct UserObject;

struct Nodes {
  std::mutex mutex;
  std::deque<Node> all;
  size_t lanes = 0;
  size_t handles = 1;                 // counts the graphs and executable graphs that exist
  std::vector<UserObject *> objects;  // each object appears once for each reference
};

// Counts a handle of the graph that was made or destroyed. With the last handle, the graph drops its references to user
// objects.
void add_handle(Nodes &nodes);
void drop_handle(Nodes &nodes);

struct Graph {
  explicit Graph(std::shared_ptr<Nodes> nodes) : nodes(std::move(nodes)) {}
  const std::shared_ptr<Nodes> nodes;
};

struct Capture {
  enum Status { active, invalidated, ended };

  Capture(uint64_t id, cudaStreamCaptureMode mode, uint64_t thread, Stream *origin, std::shared_ptr<Nodes> nodes,
          cudaGraph_t graph)
      : id(id), mode(mode), thread(thread), origin(origin), nodes(std::move(nodes)), graph(graph), members{origin} {}

  const uint64_t id;
  const cudaStreamCaptureMode mode;
  const uint64_t thread;
  Stream *const origin;
  const std::shared_ptr<Nodes> nodes;
  const cudaGraph_t graph;
  std::atomic<Status> status{active};
  std::vector<Stream *> members;  // guarded by the mutex of the captures

  void invalidate() {
    Status expected = active;
    status.compare_exchange_strong(expected, invalidated);
  }
};

struct GraphExec {
  explicit GraphExec(std::shared_ptr<Nodes> nodes) : nodes(std::move(nodes)) {}
  const std::shared_ptr<Nodes> nodes;  // does not change any more
  std::mutex mutex;
  std::vector<std::unique_ptr<Stream>> lanes;
  Work *last = nullptr;  // work of the previous launch: launches of one executable graph run in sequence
};

}  // namespace simulated
