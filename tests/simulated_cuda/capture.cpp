// SPDX-License-Identifier: Apache-2.0
// The errors are those of the CUDA programming guide's section on stream capture and of the comments in
// cuda_runtime_api.h. An operation that is not allowed invalidates the captures that it touches.
#include "simulated_cuda/capture.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace simulated {
namespace {

cudaError_t invalidate(Capture &capture, cudaError_t error) {
  capture.invalidate();
  return error;
}

// The legacy stream stands for all blocking streams. If one of them is capturing, a call on the legacy stream would
// affect that capture.
cudaError_t refuse_legacy(Device &device) {
  cudaError_t error = cudaSuccess;
  for (Stream *stream : runtime().blocking_streams(device)) {
    const std::lock_guard lock(stream->mutex());
    if (stream->capture) error = invalidate(*stream->capture, cudaErrorStreamCaptureImplicit);
  }
  return error;
}

cudaError_t add_node(Stream &stream, std::function<void()> run, cudaGraphNodeType type) {
  Capture &capture = *stream.capture;
  if (capture.status != Capture::active) return cudaErrorStreamCaptureInvalidated;
  Nodes &nodes = *capture.nodes;
  const std::lock_guard lock(nodes.mutex);
  nodes.all.push_back({std::move(run), stream.tips, stream.lane, nodes.all.size(), type});
  stream.tips = {&nodes.all.back()};
  return cudaSuccess;
}

std::vector<Work *> tails(const std::vector<Stream *> &streams) {
  std::vector<Work *> works;
  for (Stream *stream : streams) {
    const std::lock_guard lock(stream->mutex());
    works.push_back(stream->last());
  }
  return works;
}

cudaError_t submit_legacy(Stream &stream, std::function<void()> run, std::vector<Work *> after, Work **work,
                          bool waits) {
  if (const cudaError_t error = refuse_legacy(stream.device)) return error;
  for (Work *other : tails(runtime().blocking_streams(stream.device))) after.push_back(other);
  const std::lock_guard lock(stream.mutex());
  Work *pushed = stream.push(std::move(run), std::move(after), waits);
  stream.device.legacy_work = pushed;
  if (work) *work = pushed;
  return cudaSuccess;
}

void unite(std::vector<Node *> &tips, const std::vector<Node *> &more) {
  for (Node *node : more) {
    if (std::find(tips.begin(), tips.end(), node) == tips.end()) tips.push_back(node);
  }
}

void join_capture(Stream &stream, const Recorded &recorded) {
  stream.capture = recorded.capture;
  stream.tips = recorded.tips;
  const std::lock_guard lock(recorded.capture->nodes->mutex);
  stream.lane = recorded.capture->nodes->lanes++;
}

cudaError_t wait_captured(Stream &stream, const Recorded &recorded) {
  Capture &capture = *recorded.capture;
  if (capture.status == Capture::ended) return cudaErrorCapturedEvent;
  if (capture.status == Capture::invalidated) return cudaErrorStreamCaptureInvalidated;
  if (is_legacy(stream)) {
    return invalidate(capture,
                      capture.origin->blocking ? cudaErrorStreamCaptureImplicit : cudaErrorStreamCaptureUnsupported);
  }
  const std::unique_lock captures(runtime().captures_mutex);
  const std::lock_guard lock(stream.mutex());
  if (!stream.capture) {
    join_capture(stream, recorded);
    capture.members.push_back(&stream);
  } else if (stream.capture == &capture) {
    unite(stream.tips, recorded.tips);
  } else {
    stream.capture->invalidate();
    return invalidate(capture, cudaErrorStreamCaptureMerge);
  }
  return cudaSuccess;
}

// Returns whether all leaves of the graph lead to the origin's next node.
bool joined(const Capture &capture) {
  std::vector<bool> reached(capture.nodes->all.size(), false);
  for (const Node *node : capture.origin->tips) reached[node->index] = true;
  for (size_t index = reached.size(); index-- > 0;) {
    if (!reached[index]) return false;  // the nodes that follow it have higher indices, and the loop has seen them
    for (const Node *node : capture.nodes->all[index].after) reached[node->index] = true;
  }
  return true;
}

cudaError_t result_of(const Capture &capture) {
  if (capture.status == Capture::invalidated) return cudaErrorStreamCaptureInvalidated;
  return joined(capture) ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
}

void release_members(Capture &capture) {
  for (Stream *stream : capture.members) {
    const std::lock_guard lock(stream->mutex());
    stream->capture = nullptr;
    stream->tips.clear();
  }
}

cudaError_t finish_capture(Capture &capture, cudaGraph_t *graph) {
  cudaError_t error;
  {
    const std::unique_lock captures(runtime().captures_mutex);
    error = result_of(capture);
    capture.status = Capture::ended;
    --runtime().open_captures;
    release_members(capture);
    if (error != cudaSuccess) runtime().graphs.remove(capture.graph);
  }
  if (error != cudaSuccess) drop_handle(*capture.nodes);
  *graph = error == cudaSuccess ? capture.graph : nullptr;
  return error;
}

bool prohibits(const Capture &capture, const Thread &thread) {
  if (capture.status == Capture::ended || thread.mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == thread.number) return capture.mode != cudaStreamCaptureModeRelaxed;
  return thread.mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

}  // namespace

bool is_legacy(const Stream &stream) { return stream.device.legacy.load() == &stream; }

bool is_capturing(Stream &stream) {
  const std::lock_guard lock(stream.mutex());
  return stream.capture != nullptr;
}

cudaError_t submit(Stream &stream, std::function<void()> run, cudaGraphNodeType type, std::vector<Work *> after,
                   Work **work, bool waits) {
  if (const cudaError_t error = stream.device.error()) return error;
  if (work) *work = nullptr;
  if (is_legacy(stream)) return submit_legacy(stream, std::move(run), std::move(after), work, waits);
  stream.await_room();
  const std::lock_guard lock(stream.mutex());
  if (stream.capture) return add_node(stream, std::move(run), type);
  // This happens even if the event's work is done, because only the wait creates the edge.
  Work *legacy = stream.blocking ? stream.device.legacy_work.load() : nullptr;
  if (legacy) after.push_back(legacy);
  Work *pushed = stream.push(std::move(run), std::move(after), waits);
  if (work) *work = pushed;
  return cudaSuccess;
}

cudaError_t refuse_capture(Stream &stream) {
  if (is_legacy(stream)) return refuse_legacy(stream.device);
  const std::lock_guard lock(stream.mutex());
  return stream.capture ? invalidate(*stream.capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t refuse_capture(Device &device) {
  cudaError_t error = cudaSuccess;
  for (Stream *stream : runtime().all_streams(device)) {
    const std::lock_guard lock(stream->mutex());
    if (stream->capture) error = invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
  }
  return error;
}

cudaError_t refuse_unsafe_call() {
  if (runtime().open_captures == 0) return cudaSuccess;
  const std::shared_lock lock(runtime().captures_mutex);
  cudaError_t error = cudaSuccess;
  for (Capture &capture : runtime().captures) {
    if (prohibits(capture, this_thread())) error = invalidate(capture, cudaErrorStreamCaptureUnsupported);
  }
  return error;
}

cudaError_t begin_capture(Stream &stream, cudaStreamCaptureMode mode) {
  if (is_legacy(stream)) return cudaErrorStreamCaptureUnsupported;
  const std::unique_lock captures(runtime().captures_mutex);
  const std::lock_guard lock(stream.mutex());
  if (stream.capture) return cudaErrorIllegalState;
  auto nodes = std::make_shared<Nodes>();
  nodes->lanes = 1;
  const cudaGraph_t graph = runtime().graphs.create(nodes).first;
  const uint64_t id = runtime().captures.size() + 1;
  stream.capture = &runtime().captures.emplace_back(id, mode, this_thread().number, &stream, nodes, graph);
  stream.lane = 0;
  ++runtime().open_captures;
  return cudaSuccess;
}

cudaError_t end_capture(Stream &stream, cudaGraph_t *graph) {
  *graph = nullptr;
  Capture *capture;
  {
    const std::lock_guard lock(stream.mutex());
    capture = stream.capture;
  }
  if (!capture) return cudaErrorIllegalState;
  if (capture->origin != &stream) return invalidate(*capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread().number) {
    return cudaErrorStreamCaptureWrongThread;
  }
  return finish_capture(*capture, graph);
}

cudaError_t record_event(Event &event, Stream &stream) {
  if (&event.device != &stream.device) return cudaErrorInvalidResourceHandle;
  {
    const std::lock_guard lock(stream.mutex());
    if (Capture *capture = stream.capture) {
      if (capture->status != Capture::active) return cudaErrorStreamCaptureInvalidated;
      event.record({nullptr, capture, stream.tips});
      return cudaSuccess;
    }
  }
  Work *work;
  const cudaError_t error = submit(stream, nullptr, cudaGraphNodeTypeEmpty, {}, &work);
  if (error == cudaSuccess) event.record({work, nullptr, {}});
  return error;
}

cudaError_t wait_event(Stream &stream, const Event &event) {
  const Recorded recorded = event.recorded();
  if (recorded.capture) return wait_captured(stream, recorded);
  {
    const std::lock_guard lock(stream.mutex());
    if (stream.capture) return invalidate(*stream.capture, cudaErrorStreamCaptureIsolation);
  }
  if (!recorded.work) return cudaSuccess;  // the event was never recorded, so there is nothing to wait for
  return submit(stream, nullptr, cudaGraphNodeTypeEmpty, {recorded.work});
}

cudaError_t refuse_captured(const Recorded &recorded) {
  if (!recorded.capture) return cudaSuccess;
  return invalidate(*recorded.capture, cudaErrorCapturedEvent);
}

std::vector<Work *> outstanding(Stream &stream) {
  std::vector<Stream *> streams{&stream};
  if (is_legacy(stream)) {
    for (Stream *blocking : runtime().blocking_streams(stream.device)) streams.push_back(blocking);
  }
  return tails(streams);
}

void finish_all_work(Device &device) {
  for (Stream *stream : runtime().all_streams(device)) {
    for (const Work *work : outstanding(*stream)) work->wait();
  }
}

}  // namespace simulated
