// SPDX-License-Identifier: Apache-2.0
// What only a real GPU and driver show of the CUDA device.
#include <chrono>
#include <thread>

#include "cuda_fixture.h"

namespace fsdp::device {
namespace {

class GpuDeviceTest : public CudaTest {};

// For the record of a run: which GPU, and whether its memory is exportable and reachable for network cards.
TEST_F(GpuDeviceTest, SaysWhatItIs) {
  CudaContext context;
  const std::string text = context.device->description();
  RecordProperty("device", text);
  std::printf("%s\n%s\n", text.c_str(), cuda_at_run_time().c_str());
  EXPECT_NE(std::string::npos, text.find("cuMemCreate")) << text;
}

// A thread that has used no GPU has none afterwards either.
TEST_F(GpuDeviceTest, LeavesAThreadWithoutAContext) {
  CudaContext context;
  std::thread([&] {
    const auto event = context.device->create_event();
    const auto stream = context.device->create_stream("test");
    stream->record(*event);
    context.device->caller_stream(nullptr).record(*event);
    context.device->synchronize(*event);
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CUDA_OK(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 4000, cudaEnableDefault, &found));
    void *current = &function;
    ASSERT_EQ(0, reinterpret_cast<int (*)(void **)>(function)(&current));
    EXPECT_EQ(nullptr, current);
  }).join();
}

// GPU to host to GPU. The bound is far above what is to be expected (some 10 us), since machines are shared.
TEST_F(GpuDeviceTest, ALaneAnswersQuickly) {
  CudaContext context;
  const auto stream = context.device->create_stream("test");
  const auto lane = context.device->create_host_lane("lane");
  const auto event = context.device->create_event();
  constexpr int rounds = 1000;
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
  std::printf("lane: %.1f us for a round trip\n", time.count() / rounds);
  EXPECT_LT(time.count() / rounds, 1000);
}

}  // namespace
}  // namespace fsdp::device
