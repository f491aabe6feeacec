// SPDX-License-Identifier: Apache-2.0
// Does everything that the CUDA device can do, for tests of rules that always hold.
#pragma once

#include <chrono>
#include <optional>
#include <thread>

#include "cuda_fixture.h"

namespace fsdp::device {

// Creates a stream of the device's GPU, whichever GPU is current.
class StreamOf {
 public:
  explicit StreamOf(const Device &device) {
    device.with_current([&] { own_.emplace(); });
  }
  cudaStream_t get() const { return own_->get(); }

 private:
  std::optional<OwnStream> own_;
};

// Captures work of the caller and of a library stream in a graph, and then discards the graph.
inline void capture_some(Device &device, float *values, uint64_t count) {
  const StreamOf own(device);
  const auto stream = device.create_stream("captured");
  const auto begun = device.create_event(), done = device.create_event();
  EXPECT_EQ(cudaSuccess, cudaStreamBeginCapture(own.get(), cudaStreamCaptureModeGlobal));
  const auto end = [&] {
    cudaGraph_t graph = nullptr;
    (void)cudaStreamEndCapture(own.get(), &graph);
    if (graph) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    device.end_capture();
  };
  try {
    Stream &caller = device.caller_stream(own.get());
    device.begin_capture(caller.capture_id());
    caller.scale(values, 2, count);
    caller.record(*begun);
    stream->wait(*begun);
    stream->scale(values, 0.5F, count);
    stream->record(*done);
    caller.wait(*done);
  } catch (...) {
    end();
    throw;
  }
  end();
}

inline void use_all(Device &device) {
  constexpr uint64_t count = 1024, bytes = count * sizeof(float);
  const auto memory = device.allocate(bytes, "a test");
  const auto pinned = device.allocate_host(bytes, "a test");
  std::vector<float> values(count, 1);
  device.register_host(values.data(), bytes);
  struct Registered {
    Device &device;
    std::vector<float> &values;
    ~Registered() { device.unregister_host(values.data(), bytes); }
  } const registered{device, values};
  const auto stream = device.create_stream("test");
  const auto event = device.create_event();
  const auto lane = device.create_host_lane("lane");
  auto *on_gpu = reinterpret_cast<float *>(memory->data());
  device.transfer(on_gpu, FSDP_FLOAT32, values.data(), FSDP_FLOAT32, count);
  Stream &caller = device.caller_stream(nullptr);
  caller.scale(on_gpu, 2, count);
  // Enqueues a delay, so that there is work to wait for.
  device.with_current([] { (void)cuda::kernels::delay(nullptr, 2000); });
  caller.record(*event);
  stream->wait(*event);
  stream->copy(pinned->data(), memory->data(), bytes);
  stream->fill(memory->data(), 0, bytes);
  stream->record(*event);
  lane->wait(*event);
  lane->stream().run([] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
  lane->release(*stream);
  stream->record(*event);
  device.synchronize(*event);
  capture_some(device, on_gpu, count);
}

}  // namespace fsdp::device
