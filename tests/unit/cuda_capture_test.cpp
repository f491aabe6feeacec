// SPDX-License-Identifier: Apache-2.0
// Tests streams and events inside a graph capture. Library streams join the capture, and work outside of it is left
// out. A call that cannot be part of a graph reports that without ending the capture.
#include "cuda_fixture.h"

namespace fsdp::device {
namespace {

constexpr uint64_t captured_count = 1000;

class CudaCaptureTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    context_ = std::make_unique<CudaContext>();
    own_ = std::make_unique<OwnStream>();
    memory_ = context_->device->allocate(captured_count * 4, "test");
    a_ = device().create_event();
    b_ = device().create_event();
    stream_ = device().create_stream("test");
  }
  Device &device() { return *context_->device; }
  Stream &caller() { return device().caller_stream(own_->get()); }
  float *values() { return reinterpret_cast<float *>(memory_->data()); }
  std::vector<float> read() {
    std::vector<float> got(captured_count);
    device().transfer(got.data(), FSDP_FLOAT32, values(), FSDP_FLOAT32, captured_count);
    return got;
  }
  void begin() {
    CUDA_OK(cudaStreamBeginCapture(own_->get(), cudaStreamCaptureModeGlobal));
    ASSERT_NE(0u, caller().capture_id());
    device().begin_capture(caller().capture_id());
  }
  cudaGraph_t end() {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaSuccess, cudaStreamEndCapture(own_->get(), &graph));
    device().end_capture();
    return graph;
  }
  void replay(cudaGraph_t graph, int times) {
    cudaGraphExec_t exec = nullptr;
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < times; ++i) CUDA_OK(cudaGraphLaunch(exec, own_->get()));
    CUDA_OK(cudaStreamSynchronize(own_->get()));
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
  }

  std::unique_ptr<CudaContext> context_;
  std::unique_ptr<OwnStream> own_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Event> a_, b_;
  std::unique_ptr<Stream> stream_;
};

TEST_F(CudaCaptureTest, LibraryStreamsJoinAndReplaysRepeatTheWork) {
  const std::vector<float> ones(captured_count, 1);
  device().transfer(values(), FSDP_FLOAT32, ones.data(), FSDP_FLOAT32, captured_count);
  EXPECT_EQ(0u, caller().capture_id());
  begin();
  caller().scale(values(), 3, captured_count);
  caller().record(*a_);
  EXPECT_FALSE(a_->done());
  stream_->wait(*a_);
  EXPECT_EQ(caller().capture_id(), stream_->capture_id());
  stream_->add(values(), FSDP_FLOAT32, values(), FSDP_FLOAT32, captured_count);
  stream_->record(*b_);
  caller().wait(*b_);
  cudaGraph_t graph = end();
  EXPECT_TRUE(a_->done()) << "after the capture the event is as one that was never recorded";
  EXPECT_EQ(ones, read()) << "nothing is done by a capture";
  replay(graph, 2);
  EXPECT_EQ(std::vector<float>(captured_count, 36), read());
  caller().wait(*a_);
  device().synchronize(*a_);
  EXPECT_EQ(0u, stream_->capture_id());
}

TEST_F(CudaCaptureTest, WhatWasRecordedBeforeIsNotWaitedFor) {
  own_->be_late(50000);
  caller().record(*a_);
  OwnStream other;
  other.be_late(50000);
  device().caller_stream(other.get()).record(*b_);
  begin();
  caller().wait(*b_);
  caller().fill(values(), 0, captured_count * 4);
  caller().record(*a_);
  replay(end(), 1);
  device().synchronize(*b_);
}

// An earlier record that is not done keeps its order, for streams that wait for it after the capture and for the next
// record on another stream.
TEST_F(CudaCaptureTest, ARecordInItTakesNoOrderFromOneBefore) {
  GpuHeld held(*own_);
  own_->be_late(50000);  // a stream that does not wait for it comes before it
  caller().fill(values(), 0, captured_count * 4);
  caller().record(*a_);
  begin();
  caller().scale(values(), 1, captured_count);
  caller().record(*a_);
  stream_->wait(*a_);
  stream_->scale(values(), 1, captured_count);
  stream_->record(*b_);
  caller().wait(*b_);
  cudaGraph_t graph = end();
  EXPECT_FALSE(a_->done()) << "what was recorded before is forgotten";
  stream_->wait(*a_);
  stream_->fill(values(), 1, captured_count * 4);
  stream_->record(*a_);
  held.let_go();
  device().synchronize(*a_);
  EXPECT_EQ(cudaSuccess, cudaStreamQuery(own_->get())) << "the later record did not wait for the earlier one";
  float value = 0, ones = 0;
  std::memset(&ones, 1, sizeof ones);
  device().transfer(&value, FSDP_FLOAT32, values(), FSDP_FLOAT32, 1);
  EXPECT_EQ(ones, value);
  replay(graph, 1);
}

// This also holds if no stream waited for it: the record alone keeps the order of the two, and is no error.
TEST_F(CudaCaptureTest, TheRecordAfterItComesAfterTheOneBefore) {
  own_->be_late(50000);
  caller().record(*a_);
  begin();
  caller().scale(values(), 1, captured_count);
  caller().record(*a_);
  cudaGraph_t graph = end();
  stream_->record(*a_);
  device().synchronize(*a_);
  EXPECT_EQ(cudaSuccess, cudaStreamQuery(own_->get()));
  replay(graph, 1);
}

TEST_F(CudaCaptureTest, ACaptureThatWasNotBegunIsRefused) {
  CUDA_OK(cudaStreamBeginCapture(own_->get(), cudaStreamCaptureModeGlobal));
  const Failed refused = failure_of([&] { caller().record(*a_); });
  EXPECT_EQ(FSDP_INVALID_STATE, refused.status);
  EXPECT_NE(std::string::npos, refused.message.find("fsdp_begin_capture")) << refused.message;
  cudaGraph_t graph = nullptr;
  CUDA_OK(cudaStreamEndCapture(own_->get(), &graph));
  CUDA_OK(cudaGraphDestroy(graph));
}

TEST_F(CudaCaptureTest, ASecondCaptureIsRefusedUntilTheFirstEnds) {
  device().begin_capture(7);
  EXPECT_EQ(FSDP_INVALID_STATE, failure_of([&] { device().begin_capture(8); }).status);
  device().end_capture();
  device().begin_capture(8);
  device().end_capture();
}

// ... and the capture goes on.
TEST_F(CudaCaptureTest, HostWorkAndHostWaitsAreRefused) {
  const auto lane = device().create_host_lane("lane");
  begin();
  caller().scale(values(), 1, captured_count);
  caller().record(*a_);
  const Failed waited = failure_of([&] { lane->wait(*a_); });
  EXPECT_EQ(FSDP_UNSUPPORTED, waited.status);
  EXPECT_NE(std::string::npos, waited.message.find("staging")) << waited.message;
  EXPECT_EQ(FSDP_UNSUPPORTED, failure_of([&] { lane->release(caller()); }).status);
  EXPECT_EQ(FSDP_INVALID_STATE, failure_of([&] { device().synchronize(*a_); }).status);
  replay(end(), 1);
}

TEST_F(CudaCaptureTest, AllocationsAndEventsOfOthersGoOn) {
  OwnStream other;
  begin();
  caller().scale(values(), 1, captured_count);
  const auto memory = device().allocate(5000, "test");
  const auto pinned = device().allocate_host(5000, "test");
  other.be_late(60000);
  device().caller_stream(other.get()).record(*b_);
  device().synchronize(*b_);  // long enough to query the GPU meanwhile
  replay(end(), 1);
}

#ifdef FSDP_TEST_SIMULATED_CUDA
// If an error has broken a capture, its streams cannot be asked whether they are done until the program ends the
// capture.
TEST_F(CudaCaptureTest, AStreamThatEndsInABrokenOneIsGivenBackAfterIt) {
  const uint64_t bytes = simulated::allocated_bytes();
  begin();
  caller().scale(values(), 1, captured_count);
  caller().record(*a_);
  stream_->wait(*a_);
  EXPECT_NE(cudaSuccess, cudaStreamSynchronize(own_->get()));
  device().end_capture();
  stream_.reset();
  memory_.reset();
  EXPECT_EQ(bytes, simulated::allocated_bytes());
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaSuccess, cudaStreamEndCapture(own_->get(), &graph));
  (void)cudaGetLastError();
  device().allocate(64, "test");
  EXPECT_GT(bytes, simulated::allocated_bytes());
  a_.reset();
  b_.reset();
  context_.reset();
  own_.reset();
  EXPECT_EQ(0u, simulated::allocated_bytes());
  EXPECT_EQ(0u, simulated::live_handles());
}

// A mark could become a node of the graph, if the stream joins the capture at that moment.
TEST_F(CudaCaptureTest, WhatEndsMeanwhilePutsNothingOnStreams) {
  stream_->fill(values(), 0, captured_count * 4);
  begin();
  caller().scale(values(), 1, captured_count);
  const uint64_t before = simulated::calls("cuStreamWriteValue32"), bytes = simulated::allocated_bytes();
  memory_.reset();
  EXPECT_EQ(before, simulated::calls("cuStreamWriteValue32"));
  EXPECT_EQ(bytes, simulated::allocated_bytes());
  cudaGraph_t graph = end();
  CUDA_OK(cudaGraphDestroy(graph));
  device().allocate(64, "test");
  EXPECT_GT(bytes, simulated::allocated_bytes());
}
#endif

TEST_F(CudaCaptureTest, NormsCanBeCaptured) {
  const auto results = device().allocate_host(8, "test");
  const std::vector<float> twos(captured_count, 2);
  device().transfer(values(), FSDP_FLOAT32, twos.data(), FSDP_FLOAT32, captured_count);
  begin();
  caller().sum_squares(reinterpret_cast<double *>(results->data()), values(), captured_count, 100);
  replay(end(), 1);
  EXPECT_EQ(4.0 * captured_count, *reinterpret_cast<double *>(results->data()));
}

}  // namespace
}  // namespace fsdp::device
