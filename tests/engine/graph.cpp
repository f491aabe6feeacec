// SPDX-License-Identifier: Apache-2.0
#include "graph.h"

#include "element.h"

#include <cstdlib>

namespace harness {

// A test that has failed may have left a capture open.
Stream::~Stream() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  if (cudaStreamIsCapturing(stream_, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone)
    cudaStreamEndCapture(stream_, &graph);
  if (graph) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream_);
}

void nap(cudaStream_t stream, int ms) {
  CUDA(simulated::enqueue(stream, [ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }));
}

void chain(cudaStream_t earlier, cudaStream_t later) {
  cudaEvent_t event = nullptr;
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CUDA(cudaEventRecord(event, earlier));
  CUDA(cudaStreamWaitEvent(later, event, 0));
  CUDA(cudaEventDestroy(event));
}

Graph::Graph(Rank &rank, cudaStream_t stream, const std::function<void()> &part) : stream_(stream) {
  begin_capture(rank, stream);
  part();
  FSDP(fsdp_end_capture(rank.model, stream, &capture_));
  cudaGraph_t recorded = nullptr;
  CUDA(cudaStreamEndCapture(stream, &recorded));
  CUDA(cudaGraphInstantiate(&graph_, recorded, 0));
  CUDA(cudaGraphDestroy(recorded));
}

Graph::~Graph() {
  cudaStreamSynchronize(stream_);
  cudaGraphExecDestroy(graph_);
  fsdp_destroy_capture(capture_);
}

void Graph::replay(double lr, cudaStream_t stream) {
  FSDP(fsdp_prepare_replay(capture_, lr, stream));
  launch(stream);
  FSDP(fsdp_commit_replay(capture_, stream));
}

void begin_capture(Rank &rank, cudaStream_t stream) {
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  FSDP(fsdp_begin_capture(rank.model, stream));
}

void end_spoilt_capture(Rank &rank, cudaStream_t stream, const std::vector<std::string> &words) {
  fsdp_capture *capture = nullptr;
  require_error(fsdp_end_capture(rank.model, stream, &capture), FSDP_INVALID_STATE, words);
  REQUIRE(capture == nullptr);
  end_cuda_capture(stream);
}

size_t end_cuda_capture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  CUDA(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  CUDA(cudaGraphDestroy(graph));
  return nodes;
}

Scenario graph_scenario(fsdp_strategy strategy, uint32_t ranks) {
  Scenario setup = scenario_of(strategy, ranks, 0);
  setup.context.device = FSDP_DEVICE_CUDA;
  setup.context.device_transport = FSDP_TRANSPORT_STAGING;
  return setup;
}

Scenario nccl_scenario(fsdp_strategy strategy, uint32_t ranks) {
  Scenario setup = graph_scenario(strategy, ranks);
  setup.context.device_transport = FSDP_TRANSPORT_NCCL;
  return setup;
}

bool has_nccl() {
  const char *library = std::getenv("FSDP_NCCL_LIBRARY");
  return library && *library;
}

// The gradient of weights with one scale: a number that depends on the codes, times the scale.
void enqueue_grad_of_codes(Rank &rank, size_t g, size_t p, cudaStream_t stream) {
  fsdp_tensor codes = FSDP_TENSOR_INIT, scale = FSDP_TENSOR_INIT, grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_get_plane(rank.groups[g], p, FSDP_BACKWARD, FSDP_PLANE_ROW, &codes));
  FSDP(fsdp_get_plane(rank.groups[g], p, FSDP_BACKWARD, FSDP_PLANE_ROW_SCALE, &scale));
  FSDP(fsdp_acquire_grad(rank.groups[g], p, 0, stream, &grad, &accumulate));
  CUDA(simulated::enqueue(
      stream, [from = static_cast<const uint8_t *>(codes.data), factor = static_cast<const float *>(scale.data),
               to = static_cast<float *>(grad.data), count = grad.element_count, accumulate] {
        for (uint64_t i = 0; i < count; ++i)
          to[i] = (accumulate ? to[i] : 0.0f) + static_cast<float>(from[i]) * *factor;
      }));
}

void enqueue_grad(Rank &rank, size_t g, size_t p, cudaStream_t stream) {
  if (rank.def(g).params[p].quantization) return enqueue_grad_of_codes(rank, g, p, stream);
  fsdp_tensor weight = FSDP_TENSOR_INIT, grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_get_param(rank.groups[g], p, FSDP_BACKWARD, &weight));
  FSDP(fsdp_acquire_grad(rank.groups[g], p, 0, stream, &grad, &accumulate));
  CUDA(simulated::enqueue(
      stream, [from = weight.data, to = grad.data, dtype = weight.dtype, count = grad.element_count, accumulate] {
        for (uint64_t i = 0; i < count; ++i)
          store_element(to, dtype, i,
                        (accumulate ? load_element(to, dtype, i) : 0.0f) + 0.25f * load_element(from, dtype, i) +
                            0.001f * static_cast<float>(i % 7));
      }));
}

void enqueue_grads(Rank &rank, size_t g, cudaStream_t stream) {
  for (size_t p = rank.def(g).params.size(); p-- > 0;) {
    enqueue_grad(rank, g, p, stream);
    if (rank.setup.complete) FSDP(fsdp_complete_grad(rank.groups[g], p, 0, stream));
  }
}

void pass(Rank &rank, cudaStream_t stream, bool last) {
  for (fsdp_group *group : rank.groups) {
    FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, stream));
    FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, stream));
  }
  for (size_t g = rank.groups.size(); g-- > 0;) {
    FSDP(fsdp_unshard(rank.groups[g], FSDP_BACKWARD, 0, stream));
    enqueue_grads(rank, g, stream);
    FSDP(fsdp_reshard(rank.groups[g], FSDP_BACKWARD, 0, stream));
    FSDP(fsdp_reduce_grad(rank.groups[g], last ? FSDP_LAST : 0, stream));
  }
}

// Enqueues what update_own() does: SGD with momentum on the parameters that the caller updates.
void enqueue_own(Rank &rank, cudaStream_t stream) {
  const std::vector<fsdp_shard> shards = rank.shards();
  for (uint64_t s = 0; s < shards.size(); ++s) {
    fsdp_param param = FSDP_PARAM_INIT;
    FSDP(fsdp_get_param_info(shards[s].group, shards[s].param_index, &param));
    if (param.optimizer != FSDP_OPTIMIZER_CALLER) continue;
    fsdp_tensor state = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_shard_state(rank.model, s, "momentum", &state));
    CUDA(simulated::enqueue(stream, [shard = shards[s], momentum = static_cast<float *>(state.data)] {
      for (uint64_t i = 0; i < shard.element_count; ++i) {
        momentum[i] = 0.9f * momentum[i] + main_grad(shard)[i];
        main_weight(shard)[i] -= 0.01f * momentum[i];
      }
    }));
  }
}

void update(Rank &rank, cudaStream_t stream, double lr) {
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.weight_decay = 0.1;
  FSDP(fsdp_finish_grads(rank.model, 0.5, 0, stream));
  enqueue_own(rank, stream);
  FSDP(fsdp_step_adamw(rank.model, lr, &options, stream));
}

void step(Rank &rank, cudaStream_t stream, double lr) {
  pass(rank, stream, true);
  update(rank, stream, lr);
}

double lr_of(int step) { return 0.01 / (1 + step); }

Weights run(const Scenario &setup, const std::function<void(Rank &, cudaStream_t)> &train, fsdp_stats *stats) {
  Weights weights;
  simulated::set_delay(100, 5);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    const Stream stream;
    rank.load();
    train(rank, stream);
    CUDA(cudaStreamSynchronize(stream));
    auto own = rank.read_all();
    if (r == 0) weights = std::move(own);
    if (r == 0 && stats) *stats = rank.stats();
    FSDP(fsdp_close_context(context));
  });
  simulated::set_delay(0, 0);
  return weights;
}

Weights train_eagerly(const Scenario &setup, int passes, fsdp_stats *stats) {
  return run(
      setup,
      [&](Rank &rank, cudaStream_t stream) {
        for (int i = 0; i < steps; ++i) {
          for (int k = 0; k < passes; ++k) pass(rank, stream, k + 1 == passes);
          update(rank, stream, lr_of(i));
        }
      },
      stats);
}

}  // namespace harness
