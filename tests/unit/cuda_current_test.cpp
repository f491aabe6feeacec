// SPDX-License-Identifier: Apache-2.0
// The library makes its calls on its own GPU, whatever the calling thread's current GPU is. Afterwards the thread has
// the same current GPU, or none, and the same captures as before.
#include "cuda_everything.h"

#include <cudaTypedefs.h>

namespace fsdp::device {
namespace {

class CudaCurrentTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    simulated::set_device_count(2);
  }
};

// Makes the calls that create, use and destroy objects.
uint64_t foreign_calls_on(int32_t index) {
  const uint64_t before = simulated::foreign_calls();
  for (const bool overlap : {true, false}) {
    CudaContext context({.overlap = overlap}, 20000, index);
    use_all(*context.device);
    (void)context.device->description();
  }
  return simulated::foreign_calls() - before;
}

// use_all begins and ends its capture, and destroys its stream, while another GPU is current. These calls are its own.
constexpr uint64_t own_calls = 2 * 3;

TEST_F(CudaCurrentTest, EveryCallIsMadeOnTheContextsGpu) {
  CUDA_OK(cudaSetDevice(1));
  EXPECT_EQ(own_calls, foreign_calls_on(0));
  int current = -1;
  CUDA_OK(cudaGetDevice(&current));
  EXPECT_EQ(1, current);
  EXPECT_EQ(0u, foreign_calls_on(1));
}

CUcontext current_context() {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  EXPECT_EQ(cudaSuccess,
            cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 4000, cudaEnableDefault, &found));
  CUcontext current = nullptr;
  EXPECT_EQ(CUDA_SUCCESS, reinterpret_cast<PFN_cuCtxGetCurrent_v4000>(function)(&current));
  return current;
}

TEST_F(CudaCurrentTest, AThreadWithoutAContextKeepsNone) {
  std::thread([] {
    const uint64_t before = simulated::implicit_contexts();
    {
      CudaContext context({}, 20000, 1);
      const auto memory = context.device->allocate(4096, "test");
      const auto pinned = context.device->allocate_host(4096, "test");
      const auto stream = context.device->create_stream("test");
      const auto lane = context.device->create_host_lane("lane");
      std::vector<std::unique_ptr<Event>> events;
      for (int i = 0; i < 300; ++i) events.push_back(context.device->create_event());  // more than a page of words
      stream->fill(memory->data(), 0, 4096);
      stream->record(*events[0]);
      (void)stream->capture_id();
      lane->wait(*events[0]);
      lane->release(*stream);
      context.device->synchronize(*events[0]);
      EXPECT_NE(FSDP_OK, failure_of([&] { context.device->allocate(uint64_t{1} << 50, "too much"); }).status);
    }
    EXPECT_EQ(before, simulated::implicit_contexts());
    EXPECT_EQ(nullptr, current_context());
  }).join();
}

// Other code makes a capture of the strictest kind, as frameworks do.
class OpenCapture {
 public:
  explicit OpenCapture(bool here) {
    EXPECT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    const auto begin = [this] {
      EXPECT_EQ(cudaSuccess, cudaStreamBeginCapture(
                                 stream_, here_ ? cudaStreamCaptureModeThreadLocal : cudaStreamCaptureModeGlobal));
    };
    here_ = here;
    if (here)
      begin();
    else
      thread_.emplace_back([=, this] {
        begin();
        while (!end_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        end_here();
      });
    while (!is_open()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // Ends the capture, and returns whether a call had ended it already.
  void end() {
    end_ = true;
    if (here_) end_here();
    for (std::thread &thread : thread_) thread.join();
    EXPECT_EQ(cudaSuccess, ended_);
    cudaStreamDestroy(stream_);
  }

 private:
  bool is_open() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(stream_, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
  }
  void end_here() {
    cudaGraph_t graph = nullptr;
    ended_ = cudaStreamEndCapture(stream_, &graph);
    if (graph) cudaGraphDestroy(graph);
  }

  cudaStream_t stream_ = nullptr;
  bool here_ = false;
  std::atomic<bool> end_{false};
  cudaError_t ended_ = cudaErrorUnknown;
  std::vector<std::thread> thread_;
};

TEST_F(CudaCurrentTest, CapturesOfOthersGoOn) {
  for (const bool here : {true, false}) {
    SCOPED_TRACE(here ? "of this thread" : "of another thread");
    const OwnStream own;
    OpenCapture capture(here);
    const Failed failed = failure_of([&] {
      CudaContext context;
      const auto memory = context.device->allocate(4096, "test");
      const auto pinned = context.device->allocate_host(4096, "test");
      std::vector<float> values(1024, 1), got(1024);
      context.device->register_host(values.data(), 4096);
      const auto stream = context.device->create_stream("test");
      const auto lane = context.device->create_host_lane("lane");
      std::vector<std::unique_ptr<Event>> events;
      for (int i = 0; i < 300; ++i) events.push_back(context.device->create_event());
      context.device->caller_stream(own.get()).fill(memory->data(), 1, 4096);
      ASSERT_EQ(0, cuda::kernels::delay(own.get(), 60000));  // long enough to query the GPU meanwhile
      context.device->caller_stream(own.get()).record(*events[0]);
      lane->wait(*events[0]);
      lane->release(*stream);
      stream->copy(pinned->data(), memory->data(), 4096);
      stream->record(*events[1]);
      context.device->synchronize(*events[1]);
      EXPECT_TRUE(context.device->unregister_host(values.data(), 4096));
    });
    EXPECT_EQ(FSDP_OK, failed.status) << failed.message;
    capture.end();
  }
  EXPECT_EQ(0u, simulated::allocated_bytes());
}

}  // namespace
}  // namespace fsdp::device
