// SPDX-License-Identifier: Apache-2.0
// What a capture records and a launch runs.
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
  size_t lane;   // which of the captured streams
  size_t index;  // in the graph; those it comes after have lower ones
  cudaGraphNodeType type;
};

struct UserObject;

struct Nodes {
  std::mutex mutex;
  std::deque<Node> all;
  size_t lanes = 0;
  size_t handles = 1;                 // graphs and executable graphs alive
  std::vector<UserObject *> objects;  // a reference to each, as often as it is in here
};

// A handle of the graph's has been made, or destroyed: with the last one the graph's references to user objects go.
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
  std::vector<Stream *> members;  // guarded by the captures' mutex

  void invalidate() {
    Status expected = active;
    status.compare_exchange_strong(expected, invalidated);
  }
};

struct GraphExec {
  explicit GraphExec(std::shared_ptr<Nodes> nodes) : nodes(std::move(nodes)) {}
  const std::shared_ptr<Nodes> nodes;  // not changed any more
  std::mutex mutex;
  std::vector<std::unique_ptr<Stream>> lanes;
  Work *last = nullptr;  // of the launch before: launches of one executable graph follow each other
};

}  // namespace simulated
