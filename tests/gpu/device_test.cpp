// SPDX-License-Identifier: Apache-2.0
// Tests properties of the CUDA device that only a real GPU and driver show.
#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include "cuda_fixture.h"

namespace fsdp::device {
namespace {

class GpuDeviceTest : public CudaTest {};

// Prints for the record of a run which GPU it used, and whether the GPU's memory can be exported and reached by network
// cards.
TEST_F(GpuDeviceTest, TheDescriptionNamesTheGpuAndItsMemory) {
  CudaContext context;
  const std::string text = context.device->description();
  RecordProperty("device", text);
  std::printf("%s\n%s\n", text.c_str(), cuda_at_run_time().c_str());
  EXPECT_NE(std::string::npos, text.find("cuMemCreate")) << text;
}

// A thread that has used no GPU has no context afterwards either. Another thread looks up the driver's function,
// because the lookup is a call into the runtime.
TEST_F(GpuDeviceTest, LeavesAThreadWithoutAContext) {
  CudaContext context;
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  CUDA_OK(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 4000, cudaEnableDefault, &found));
  std::thread([&] {
    {
      const auto memory = context.device->allocate(4096, "test");
      const auto pinned = context.device->allocate_host(4096, "test");
      std::vector<std::unique_ptr<Event>> events;
      for (int i = 0; i < 300; ++i) events.push_back(context.device->create_event());  // more than a page of words
      const auto stream = context.device->create_stream("test");
      stream->fill(memory->data(), 0, 4096);
      stream->record(*events[0]);
      (void)stream->capture_id();
      context.device->caller_stream(nullptr).record(*events[1]);
      context.device->synchronize(*events[0]);
      context.device->synchronize(*events[1]);
    }
    void *current = &function;
    ASSERT_EQ(0, reinterpret_cast<int (*)(void **)>(function)(&current));
    EXPECT_EQ(nullptr, current);
  }).join();
}

// Objects that are destroyed while the GPU is busy are waited for no longer than the timeout, and are released
// afterwards. A kernel that ends by itself stands for one that does not end.
TEST_F(GpuDeviceTest, ABusyGpuHoldsUpNoEnd) {
  size_t before = 0, after = 0, total = 0;
  constexpr uint64_t bytes = uint64_t{64} << 20;
  CudaContext context({}, 100);
  OwnStream own;
  CUDA_OK(cudaMemGetInfo(&before, &total));
  auto memory = context.device->allocate(bytes, "test");
  auto stream = context.device->create_stream("test");
  const auto event = context.device->create_event();
  own.be_late(6000000);
  context.device->caller_stream(own.get()).record(*event);
  stream->wait(*event);
  stream->fill(memory->data(), 1, bytes);
  const auto since = std::chrono::steady_clock::now();
  stream.reset();
  memory.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::milliseconds(5000));
  CUDA_OK(cudaStreamSynchronize(own.get()));
  context.device->create_stream("another").reset();  // its end finds that the work is done
  CUDA_OK(cudaMemGetInfo(&after, &total));
  EXPECT_GE(after + bytes / 2, before);
}

// Measures GPU to host to GPU. The bound is far above the expected time (some 10 us), because machines are shared. The
// median of several batches counts, because a thread may be held up in any of them.
TEST_F(GpuDeviceTest, ALaneAnswersQuickly) {
  CudaContext context;
  const auto stream = context.device->create_stream("test");
  const auto lane = context.device->create_host_lane("lane");
  const auto event = context.device->create_event();
  constexpr int rounds = 200;
  std::array<double, 5> us{};
  for (double &of_a_round : us) {
    const auto since = std::chrono::steady_clock::now();
    for (int round = 0; round < rounds; ++round) {
      stream->record(*event);
      lane->wait(*event);
      lane->stream().run([] {});
      lane->release(*stream);
    }
    stream->record(*event);
    context.device->synchronize(*event);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - since;
    of_a_round = time.count() / rounds;
  }
  std::sort(us.begin(), us.end());
  const double median = us[us.size() / 2];
  std::printf("lane: %.1f us for a round trip\n", median);
  EXPECT_LT(median, 1000);
}

}  // namespace
}  // namespace fsdp::device
