// SPDX-License-Identifier: Apache-2.0
// Implements the runtime's capture and graphs. A launch runs the nodes of each captured stream on a thread of their
// own, with the recorded edges only.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "simulated_cuda/call.h"
#include "simulated_cuda/capture.h"

using namespace simulated;  // NOLINT: the functions below are C's

namespace {

cudaError_t capture_status(cudaStream_t handle, cudaStreamCaptureStatus *status, Stream **stream) {
  *stream = runtime().stream(handle);
  if (!*stream) return cudaErrorInvalidResourceHandle;
  if (!status) return cudaErrorInvalidValue;
  if (is_legacy(**stream)) {  // this call only queries, so it invalidates nothing
    for (Stream *blocking : runtime().blocking_streams((*stream)->device)) {
      if (is_capturing(*blocking)) return cudaErrorStreamCaptureImplicit;
    }
  }
  const std::lock_guard lock((*stream)->mutex());
  const Capture *capture = (*stream)->capture;
  *status = !capture                             ? cudaStreamCaptureStatusNone
            : capture->status == Capture::active ? cudaStreamCaptureStatusActive
                                                 : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t valid_mode(cudaStreamCaptureMode mode) {
  const bool known = mode == cudaStreamCaptureModeGlobal || mode == cudaStreamCaptureModeThreadLocal ||
                     mode == cudaStreamCaptureModeRelaxed;
  return known ? cudaSuccess : cudaErrorInvalidValue;
}

// Runs the nodes of the launch after start, and returns the result of the launch.
std::vector<Work *> run_nodes(GraphExec &exec, Work *start) {
  std::vector<Work *> works;
  std::vector<Work *> ends;
  for (auto &lane : exec.lanes) {
    const std::lock_guard lock(lane->mutex());
    lane->push(nullptr, {start});
  }
  for (const Node &node : exec.nodes->all) {
    std::vector<Work *> after;
    for (const Node *other : node.after) {
      if (other->lane != node.lane) after.push_back(works[other->index]);
    }
    Stream &lane = *exec.lanes[node.lane];
    const std::lock_guard lock(lane.mutex());
    works.push_back(lane.push(node.run, std::move(after)));
  }
  for (auto &lane : exec.lanes) {
    const std::lock_guard lock(lane->mutex());
    ends.push_back(lane->last());
  }
  return ends;
}

cudaError_t launch(GraphExec &exec, Stream &stream) {
  if (const cudaError_t error = refuse_capture(stream)) return error;  // graphs in graphs are not simulated
  const std::lock_guard lock(exec.mutex);
  while (exec.lanes.size() < exec.nodes->lanes) exec.lanes.push_back(runtime().create_lane(stream.device));
  std::vector<Work *> before;
  if (exec.last) before.push_back(exec.last);
  Work *start;
  if (const cudaError_t error = submit(stream, nullptr, cudaGraphNodeTypeEmpty, before, &start)) return error;
  return submit(stream, nullptr, cudaGraphNodeTypeEmpty, run_nodes(exec, start), &exec.last);
}

}  // namespace

cudaError_t CUDARTAPI cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call("cudaStreamBeginCapture", healthy_device, [&] {
    Stream *stream = runtime().stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = valid_mode(mode)) return error;
    return begin_capture(*stream, mode);
  });
}

cudaError_t CUDARTAPI cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  return call("cudaStreamEndCapture", healthy_device, [&] {
    Stream *stream = runtime().stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    return graph ? end_capture(*stream, graph) : cudaErrorInvalidValue;
  });
}

cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  return call("cudaStreamIsCapturing", healthy_device, [&] {
    Stream *stream;
    return capture_status(handle, status, &stream);
  });
}

#if CUDART_VERSION >= 13000
// Dependencies are not returned: no test needs them, and the call returns cudaErrorNotSupported.
cudaError_t CUDARTAPI cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status,
                                               unsigned long long *id, cudaGraph_t *graph,
                                               const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                               size_t *dependency_count) {
  return call("cudaStreamGetCaptureInfo", healthy_device, [&] {
    if (dependencies || edges) return cudaErrorNotSupported;
    Stream *stream;
    if (const cudaError_t error = capture_status(handle, status, &stream)) return error;
    const std::lock_guard lock(stream->mutex());
    if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
    if (id) *id = stream->capture->id;
    if (graph) *graph = stream->capture->graph;
    if (dependency_count) *dependency_count = stream->tips.size();
    return cudaSuccess;
  });
}
#endif

cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  return call("cudaThreadExchangeStreamCaptureMode", healthy_device, [&] {
    if (!mode || valid_mode(*mode) != cudaSuccess) return cudaErrorInvalidValue;
    std::swap(this_thread().mode, *mode);
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t *nodes, size_t *count) {
  return call("cudaGraphGetNodes", healthy_device, [&] {
    const Graph *graph = runtime().graphs.find(handle);
    if (!graph || !count) return cudaErrorInvalidValue;
    const std::lock_guard lock(graph->nodes->mutex);
    std::deque<Node> &all = graph->nodes->all;
    for (size_t index = 0; nodes && index < *count; ++index) {
      nodes[index] = index < all.size() ? reinterpret_cast<cudaGraphNode_t>(&all[index]) : nullptr;
    }
    *count = nodes ? std::min(*count, all.size()) : all.size();
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType *type) {
  return call("cudaGraphNodeGetType", healthy_device, [&] {
    if (!node || !type) return cudaErrorInvalidValue;
    *type = reinterpret_cast<const Node *>(node)->type;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaGraphDestroy(cudaGraph_t graph) {
  return call("cudaGraphDestroy", healthy_device, [&] {
    const Graph *removed = runtime().graphs.remove(graph);
    if (!removed) return cudaErrorInvalidValue;
    drop_handle(*removed->nodes);
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t handle, unsigned long long flags) {
  return call("cudaGraphInstantiate", healthy_device, [&] {
    const Graph *graph = runtime().graphs.find(handle);
    if (!exec || !graph) return cudaErrorInvalidValue;
    if (flags != 0) return cudaErrorNotSupported;  // no flag is simulated
    *exec = runtime().graph_execs.create(graph->nodes).first;
    add_handle(*graph->nodes);
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
  return call("cudaGraphUpload", healthy_device, [&] {
    return runtime().graph_execs.find(exec) && runtime().stream(stream) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t CUDARTAPI cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  return call("cudaGraphLaunch", healthy_device, [&] {
    GraphExec *exec = runtime().graph_execs.find(handle);
    Stream *stream = runtime().stream(stream_handle);
    if (!exec) return cudaErrorInvalidValue;
    return stream ? launch(*exec, *stream) : cudaErrorInvalidResourceHandle;
  });
}

// A launch in progress still completes.
cudaError_t CUDARTAPI cudaGraphExecDestroy(cudaGraphExec_t handle) {
  return call("cudaGraphExecDestroy", healthy_device, [&] {
    GraphExec *exec = runtime().graph_execs.remove(handle);
    if (!exec) return cudaErrorInvalidValue;
    {
      const std::lock_guard lock(exec->mutex);
      for (auto &lane : exec->lanes) lane->close();
    }
    drop_handle(*exec->nodes);
    return cudaSuccess;
  });
}
