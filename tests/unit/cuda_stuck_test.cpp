// SPDX-License-Identifier: Apache-2.0
// A GPU's work does not end, over the simulated runtime, where cudaFree and similar calls then never return. Destroy
// calls return, keep memory that is in use, and log it once. If the GPU goes on after all, they release the memory.
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "cuda_fixture.h"

namespace fsdp::device {
namespace {

using std::chrono::milliseconds, std::chrono::steady_clock;

// Contexts are made and used under it too, by threads that a busy machine may hold up.
constexpr uint32_t patience_ms = 3000;

class CudaStuckTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    simulated::set_device_count(2);
  }
  Options options() {
    Options made;
    made.warn = [this](const std::string &text) { warnings_.push_back(text); };
    return made;
  }
  void stop() { hold_.emplace(); }
  void go_on() { hold_.reset(); }
  // Returns whether the body ended while the GPU stood still. Its thread has GPU 1 as its current one.
  template <class Body>
  bool ends(Body body) {
    std::atomic<bool> ended{false};
    std::thread thread([&] {
      (void)cudaSetDevice(1);
      body();
      ended = true;
    });
    for (int i = 0; i < 10000 && !ended; ++i) std::this_thread::sleep_for(milliseconds(1));
    const bool in_time = ended;
    if (!in_time) go_on();
    thread.join();
    return in_time;
  }

  std::optional<simulated::Hold> hold_;
  std::vector<std::string> warnings_;
};

// Makes everything that a context may have when it is destroyed.
struct Much {
  explicit Much(Device &device) : device(device), host(1024) {
    for (int i = 0; i < 20; ++i) memory.push_back(device.allocate(4096, "test"));
    pinned = device.allocate_host(4096, "test");
    device.register_host(host.data(), 4096);
    for (int i = 0; i < 5; ++i) streams.push_back(device.create_stream("test"));
    for (int i = 0; i < 10; ++i) events.push_back(device.create_event());
    lane = device.create_host_lane("lane");
  }
  ~Much() { kept_mapped = !device.unregister_host(host.data(), 4096); }
  void start() {
    for (size_t i = 0; i < streams.size(); ++i) {
      streams[i]->fill(memory[i]->data(), 0, 4096);
      streams[i]->record(*events[i]);
    }
    streams[0]->copy(pinned->data(), memory[0]->data(), 4096);
    lane->stream().run([] { std::this_thread::sleep_for(milliseconds(1)); });
    lane->release(*streams[0]);
    streams[1]->record(*events[7]);
    device.caller_stream(nullptr).wait(*events[7]);
    device.caller_stream(nullptr).record(*events[8]);
  }
  Device &device;
  std::vector<float> host;
  std::vector<std::unique_ptr<Memory>> memory;
  std::unique_ptr<Memory> pinned;
  std::vector<std::unique_ptr<Event>> events;
  std::vector<std::unique_ptr<Stream>> streams;
  std::unique_ptr<HostLane> lane;
  static inline bool kept_mapped = false;
};

TEST_F(CudaStuckTest, ItsEndIsNotWaitedForAndIsToldOnce) {
  auto context = std::make_unique<CudaContext>(options(), patience_ms);
  auto much = std::make_unique<Much>(*context->device);
  const uint64_t on_gpu = simulated::allocated_bytes();
  const char *const waiting[] = {"cudaFree",   "cudaFreeHost",      "cudaHostUnregister",
                                 "cuMemUnmap", "cudaStreamDestroy", "cuDevicePrimaryCtxRelease"};
  std::vector<uint64_t> before;
  for (const char *call : waiting) before.push_back(simulated::calls(call));
  stop();
  much->start();
  const auto since = steady_clock::now();
  EXPECT_TRUE(ends([&] {
    much.reset();
    context.reset();
  })) << "a call waited for the GPU";
  EXPECT_LT(steady_clock::now() - since, milliseconds(2 * patience_ms)) << "waited more than once";
  for (size_t i = 0; i < std::size(waiting); ++i) EXPECT_EQ(before[i], simulated::calls(waiting[i])) << waiting[i];
  EXPECT_EQ(on_gpu, simulated::allocated_bytes());
  EXPECT_TRUE(Much::kept_mapped);
  ASSERT_EQ(1u, warnings_.size());
  EXPECT_NE(std::string::npos, warnings_[0].find(std::to_string(on_gpu) + " bytes of its memory")) << warnings_[0];
  go_on();
}

// A destroy on another thread waits without holding locks that this thread needs.
TEST_F(CudaStuckTest, OtherThreadsGoOnMeanwhile) {
  constexpr uint32_t long_ms = 8000;
  CudaContext context(options(), long_ms);
  auto memory = context.device->allocate(4096, "test");
  const auto stream = context.device->create_stream("test");
  stop();
  stream->fill(memory->data(), 0, 4096);
  const uint64_t marks = simulated::calls("cudaEventRecord");
  std::thread thread([&] { memory.reset(); });
  while (simulated::calls("cudaEventRecord") == marks) std::this_thread::sleep_for(milliseconds(1));
  const auto since = steady_clock::now();
  const auto other = context.device->create_stream("other");
  context.device->begin_capture(1);
  context.device->end_capture();
  EXPECT_LT(steady_clock::now() - since, milliseconds(long_ms / 2));
  go_on();
  thread.join();
}

// A stream's queue is limited, and CUDA waits if it is full.
TEST_F(CudaStuckTest, ItsQueuesDoNotGrow) {
  CudaContext context(options(), patience_ms);
  std::vector<std::unique_ptr<Memory>> memory;
  for (int i = 0; i < 200; ++i) memory.push_back(context.device->allocate(64, "test"));
  const auto stream = context.device->create_stream("test");
  stop();
  stream->fill(memory[0]->data(), 0, 64);
  const uint64_t before = simulated::calls("cudaEventRecord");
  EXPECT_TRUE(ends([&] { memory.clear(); }));
  EXPECT_LT(simulated::calls("cudaEventRecord") - before, 10u);
  go_on();
}

// Kept memory is freed as soon as the library finds that the GPU goes on. The context waits for the rest as usual.
TEST_F(CudaStuckTest, WhatComesBackLeavesNothing) {
  auto context = std::make_unique<CudaContext>(options(), patience_ms);
  const uint64_t at_first = simulated::allocated_bytes();
  auto much = std::make_unique<Much>(*context->device);
  stop();
  much->start();
  EXPECT_TRUE(ends([&] { much.reset(); }));
  EXPECT_LT(at_first, simulated::allocated_bytes());
  go_on();
  // Each destroy looks again. On a busy machine the first look may come before the late work has ended.
  const auto since = steady_clock::now();
  do {
    const auto event = context->device->create_event();
    const auto stream = context->device->create_stream("test");
    stream->record(*event);
    context->device->synchronize(*event);
  } while (simulated::allocated_bytes() != at_first && steady_clock::now() - since < std::chrono::seconds(30));
  EXPECT_EQ(at_first, simulated::allocated_bytes());
  context.reset();
  EXPECT_EQ(0u, simulated::allocated_bytes());
  EXPECT_EQ(0u, simulated::pinned_bytes());
  EXPECT_EQ(0u, simulated::live_handles());
  EXPECT_TRUE(warnings_.empty()) << warnings_[0];
}

// A kernel of the program never ends, on a stream that the library has only queried.
TEST_F(CudaStuckTest, WorkOfTheProgramIsNotWaitedForEither) {
  OwnStream own;
  auto context = std::make_unique<CudaContext>(options(), patience_ms);
  auto memory = context->device->allocate(4096, "test");
  auto event = context->device->create_event();
  stop();
  own.be_late(1000);
  context->device->caller_stream(own.get()).record(*event);
  EXPECT_TRUE(ends([&] {
    event.reset();
    memory.reset();
    context.reset();
  }));
  EXPECT_EQ(1u, warnings_.size());
  go_on();
}

// An event's word is used again only when no work remains that writes it.
TEST_F(CudaStuckTest, EventsAfterItAreNotDoneTooEarly) {
  CudaContext context(options(), patience_ms);
  const auto stream = context.device->create_stream("test");
  const auto memory = context.device->allocate(4096, "test");
  stop();
  for (int i = 0; i < 300; ++i) {  // more than a page of words, but not more than a stream takes
    const auto event = context.device->create_event();
    stream->fill(memory->data(), 0, 16);
    stream->record(*event);
    ASSERT_FALSE(event->done()) << i;
  }
  go_on();
  const auto event = context.device->create_event();
  stream->record(*event);
  context.device->synchronize(*event);
}

}  // namespace
}  // namespace fsdp::device
