// SPDX-License-Identifier: Apache-2.0
// Tests host work between GPU work. The order of both is kept, and the GPU always goes on.
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "cuda_fixture.h"

namespace fsdp::device {
namespace {

using namespace std::chrono_literals;

// Tests that wait for the timeout use this value. It also limits the creation of contexts, by threads that a busy
// machine may delay.
constexpr uint32_t limit_ms = 3000;

// Returns whether the stream is done within 10 s, whatever happened to the context.
bool goes_on(const Stream &stream) {
  for (int i = 0; i < 2000; ++i) {
    if (cudaStreamQuery(stream.handle()) == cudaSuccess) return true;
    std::this_thread::sleep_for(5ms);
  }
  return false;
}

class CudaLaneTest : public CudaTest {};

// Computes value = value * 2 on the GPU, and value / 2 + 1 on the host.
void ping_pong(const Options &options, int rounds) {
  CudaContext context(options);
  Device &device = *context.device;
  const auto memory = device.allocate_host(4, "test");
  auto *value = reinterpret_cast<float *>(memory->data());
  const auto stream = device.create_stream("test");
  const auto lane = device.create_host_lane("lane");
  const auto event = device.create_event();
  for (int round = 0; round < rounds; ++round) {
    stream->scale(value, 2, 1);
    stream->record(*event);
    lane->wait(*event);
    lane->stream().run([=] { *value = *value / 2 + 1; });
    lane->release(*stream);
  }
  stream->record(*event);
  device.synchronize(*event);
  EXPECT_EQ(static_cast<float>(rounds), *value);
}

TEST_F(CudaLaneTest, TheLaneAndTheGpuTakeTurns) { ping_pong({}, 1000); }
TEST_F(CudaLaneTest, PingPongUnderDelays) { ping_pong({.delay_us = 300, .delay_seed = 3}, 100); }
TEST_F(CudaLaneTest, PingPongWithoutOverlap) { ping_pong({.overlap = false}, 100); }

TEST_F(CudaLaneTest, ReleasesStreamsOfTheCallerToo) {
  CudaContext context;
  Device &device = *context.device;
  OwnStream own;
  const auto memory = device.allocate_host(4, "test");
  auto *value = reinterpret_cast<float *>(memory->data());
  const auto lane = device.create_host_lane("lane");
  const auto event = device.create_event();
  for (int round = 0; round < 10; ++round) {
    OwnStream other;
    for (const cudaStream_t handle : {own.get(), other.get()}) {
      Stream &caller = device.caller_stream(handle);
      lane->stream().run([=] {
        std::this_thread::sleep_for(200us);
        *value = *value + 1;
      });
      lane->release(caller);
      caller.scale(value, 2, 1);
      caller.record(*event);
      lane->wait(*event);
      lane->stream().run([=] { *value = *value / 2; });
      lane->stream().record(*event);
      device.synchronize(*event);
    }
  }
  EXPECT_EQ(20, *value);
}

// A wait is for the record that exists when the wait is requested. Otherwise the lane could wait for work that itself
// waits for the lane.
TEST_F(CudaLaneTest, ALaterRecordMovesNoWait) {
  CudaContext context({}, 5000);
  Device &device = *context.device;
  const auto stream = device.create_stream("test");
  const auto lane = device.create_host_lane("lane");
  const auto event = device.create_event();
  for (int round = 0; round < 20; ++round) {
    lane->stream().run([] { std::this_thread::sleep_for(1ms); });
    stream->record(*event);
    lane->wait(*event);
    lane->stream().run([] {});
    lane->release(*stream);
    stream->record(*event);
  }
  device.synchronize(*event);
  EXPECT_FALSE(context.failure.failed());
}

#ifdef FSDP_TEST_SIMULATED_CUDA
// CUDA may hold a thread that enqueues while another thread waits there for the GPU, which may wait for this lane.
TEST_F(CudaLaneTest, EnqueuesNothingOnItsThread) {
  CudaContext context;
  const auto stream = context.device->create_stream("test");
  const auto lane = context.device->create_host_lane("lane");
  const auto event = context.device->create_event();
  std::optional<simulated::Hold> hold(std::in_place);
  stream->record(*event);
  lane->wait(*event);
  const uint64_t records = simulated::calls("cudaEventRecord"), looks = simulated::calls("cudaEventQuery");
  for (int i = 0; i < 5000 && simulated::calls("cudaEventQuery") < looks + 5; ++i) std::this_thread::sleep_for(1ms);
  EXPECT_LE(looks + 5, simulated::calls("cudaEventQuery")) << "it does not look at the GPU";
  EXPECT_EQ(records, simulated::calls("cudaEventRecord"));
  hold.reset();
  lane->stream().record(*event);
  context.device->synchronize(*event);
}

// Streams of two ranks may share a queue of CUDA. A stream that waits for the host could then hold up another rank's
// stream that brings the host its data.
TEST_F(CudaLaneTest, WhereContextsShareAGpuTheCallerWaitsInPlaceOfTheStream) {
  CudaContext context, other;
  Device &device = *context.device;
  const auto stream = device.create_stream("test");
  const auto lane = device.create_host_lane("lane");
  const auto event = device.create_event();
  // Returns whether the lane's work is done when release returns, and how many waits the stream got.
  const auto release = [&](bool alone) {
    const uint64_t before = simulated::calls("cuStreamWaitValue32");
    std::atomic<bool> go{false}, done{false};
    lane->stream().run([&go = go, &done = done] {
      while (!go) std::this_thread::sleep_for(1ms);
      done = true;
    });
    std::thread lets_go([&] {
      std::this_thread::sleep_for(20ms);
      if (!alone) go = true;
    });
    lane->release(*stream);
    const bool was_done = done;
    go = true;
    lets_go.join();
    stream->record(*event);
    device.synchronize(*event);
    return std::pair(was_done, simulated::calls("cuStreamWaitValue32") - before);
  };
  EXPECT_EQ(release(true), std::pair(false, uint64_t{1}));
  {
    const auto second = device.create_host_lane("another of the same context");
    EXPECT_EQ(release(true), std::pair(false, uint64_t{1}));
    const auto theirs = other.device->create_host_lane("another context's");
    EXPECT_EQ(release(false), std::pair(true, uint64_t{0}));
  }
  EXPECT_EQ(release(true), std::pair(false, uint64_t{1}));
}

TEST_F(CudaLaneTest, ContextsOnTwoGpusShareNone) {
  simulated::set_device_count(2);
  CudaContext context, other({}, 20000, 1);
  const auto stream = context.device->create_stream("test");
  const auto lane = context.device->create_host_lane("lane"), theirs = other.device->create_host_lane("theirs");
  const auto event = context.device->create_event();
  std::atomic<bool> go{false};
  lane->stream().run([&go = go] {
    while (!go) std::this_thread::sleep_for(1ms);
  });
  lane->release(*stream);
  EXPECT_EQ(simulated::calls("cuStreamWaitValue32"), 1U);
  go = true;
  stream->record(*event);
  context.device->synchronize(*event);
}
#endif

TEST_F(CudaLaneTest, AFailureLetsTheGpuGoOn) {
  CudaContext context;
  Device &device = *context.device;
  const auto memory = device.allocate_host(4, "test");
  const auto stream = device.create_stream("test");
  const auto lane = device.create_host_lane("lane");
  const auto event = device.create_event();
  std::atomic<bool> skipped{true};
  lane->stream().run([] {
    std::this_thread::sleep_for(20ms);
    fail(FSDP_PEER_FAILED, "as the test wants it");
  });
  lane->stream().run([&skipped = skipped] { skipped = false; });
  lane->release(*stream);
  stream->fill(memory->data(), 7, 4);
  stream->record(*event);
  EXPECT_EQ("as the test wants it", failure_of([&] { device.synchronize(*event); }).message);
  EXPECT_TRUE(goes_on(*stream));
  EXPECT_EQ(std::byte{7}, memory->data()[0]);
  EXPECT_TRUE(skipped);
}

TEST_F(CudaLaneTest, IsDestroyedWithWorkInFlight) {
  CudaContext context;
  Device &device = *context.device;
  const auto memory = device.allocate_host(4, "test");
  auto *value = reinterpret_cast<float *>(memory->data());
  const auto stream = device.create_stream("test");
  for (int round = 0; round < 10; ++round) {
    const auto lane = device.create_host_lane("lane");
    const auto event = device.create_event();
    stream->scale(value, 1, 1);
    stream->record(*event);
    lane->wait(*event);
    lane->stream().run([=] {
      std::this_thread::sleep_for(2ms);
      *value = *value + 1;
    });
    lane->release(*stream);
  }
  const auto done = device.create_event();
  stream->record(*done);
  device.synchronize(*done);
  EXPECT_EQ(10, *value);
}

// A lane's thread gives up on a GPU that takes too long. Work that waits for the lane goes on when the GPU does.
TEST_F(CudaLaneTest, ALateGpuIsATimeout) {
  CudaContext context({}, limit_ms);
  Device &device = *context.device;
  OwnStream own;
  const auto stream = device.create_stream("test");
  const auto lane = device.create_host_lane("lane");
  const auto event = device.create_event();
  GpuHeld held(own);
  device.caller_stream(own.get()).record(*event);
  lane->wait(*event);
  lane->release(*stream);
  for (int i = 0; i < 20000 && !context.failure.failed(); ++i) std::this_thread::sleep_for(1ms);
  ASSERT_TRUE(context.failure.failed());
  EXPECT_EQ(FSDP_TIMEOUT, context.failure.get()->status);
  EXPECT_NE(std::string::npos, context.failure.get()->message.find("the caller's stream"))
      << context.failure.get()->message;
  held.let_go();
  EXPECT_TRUE(goes_on(*stream));
  CUDA_OK(cudaStreamSynchronize(own.get()));
}

TEST_F(CudaLaneTest, ReleasesOnlyStreamsOfTheGpu) {
  CudaContext context;
  const auto lane = context.device->create_host_lane("lane");
  EXPECT_EQ(FSDP_INTERNAL, failure_of([&] { lane->release(context.device->calling_thread()); }).status);
  EXPECT_EQ(FSDP_INTERNAL, failure_of([&] {
                             const auto event = context.device->create_event();
                             lane->stream().run([] { std::this_thread::sleep_for(20ms); });
                             lane->stream().record(*event);
                             context.device->create_stream("test")->wait(*event);
                           }).status);
}

TEST_F(CudaLaneTest, SynchronizeEndsAtTheTimeoutAndForTheHook) {
  CudaContext context({}, limit_ms);
  OwnStream own;
  const auto event = context.device->create_event();
  std::optional<GpuHeld> held(std::in_place, own);
  context.device->caller_stream(own.get()).record(*event);
  const Failed late = failure_of([&] { context.device->synchronize(*event); });
  EXPECT_EQ(FSDP_TIMEOUT, late.status);
  EXPECT_NE(std::string::npos, late.message.find("within 3000 ms")) << late.message;
  held.reset();
  Failure failure;
  std::atomic<bool> stops{false};  // set later, because making the device waits, too
  const auto hook = [](void *data) -> int32_t { return static_cast<std::atomic<bool> *>(data)->load(); };
  const Waiter waiter(failure, hook, &stops, 20000);
  const auto device = create_cuda_device(0, {}, waiter, failure);
  const auto other = device->create_event();
  held.emplace(own);  // held later, because making a device may wait for the whole GPU
  device->caller_stream(own.get()).record(*other);
  stops = true;
  EXPECT_EQ(FSDP_INTERRUPTED, failure_of([&] { device->synchronize(*other); }).status);
  held.reset();
  CUDA_OK(cudaStreamSynchronize(own.get()));
}

}  // namespace
}  // namespace fsdp::device
