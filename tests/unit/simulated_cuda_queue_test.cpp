// SPDX-License-Identifier: Apache-2.0
// Tests streams that share a hardware queue. Work that waits at the queue's head blocks the work behind it, but work
// that has started does not.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../library_threads.h"
#include "simulated_cuda/environment.h"
#include "simulated_cuda_fixture.h"

namespace {

using namespace std::chrono_literals;

class SimulatedQueues : public SimulatedCuda {
 protected:
  // Makes this many queues. Each new stream gets the one with the fewest streams.
  static void set_fair_queues(uint64_t count) {
    simulated::set_queues(count);
    simulated::set_fair_queues(true);
  }
  void TearDown() override {
    ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    SimulatedCuda::TearDown();
  }
  static bool done(cudaStream_t of) { return cudaStreamQuery(of) == cudaSuccess; }
  static bool comes(cudaStream_t of) {
    const auto last = std::chrono::steady_clock::now() + 60s;
    while (!done(of) && std::chrono::steady_clock::now() < last) std::this_thread::sleep_for(1ms);
    return done(of);
  }
  // Waits until all is done, or until the rest waits for something that only the test lets go on. Returns whether all
  // is done.
  static bool comes_by_itself(cudaStream_t of) {
    const auto last = std::chrono::steady_clock::now() + 60s;
    while (!done(of) && !simulated::waits(of) && std::chrono::steady_clock::now() < last)
      std::this_thread::sleep_for(1ms);
    return done(of);
  }
  static void wait_for_word(cudaStream_t on, int *word) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    EXPECT_CUDA(cudaSuccess,
                cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, 12000, cudaEnableDefault, &found));
    const auto wait = reinterpret_cast<PFN_cuStreamWaitValue32_v11070>(function);
    ASSERT_EQ(wait(on, reinterpret_cast<CUdeviceptr>(word), 1, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
  }
  static void write(int *word) { std::atomic_ref(*word).store(1); }
};

// The streams share one queue, have one each, or have none.
TEST_F(SimulatedQueues, WhatWaitsHoldsUpOtherStreams) {
  for (const uint64_t queues : {1, 2, 0}) {
    set_fair_queues(queues);
    int *word = pinned_ints(1), *memory = device_ints(1);
    const cudaStream_t first = stream(), second = stream();
    wait_for_word(first, word);
    EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(memory, 0, 4, second));
    EXPECT_EQ(comes_by_itself(second), queues != 1) << queues;
    write(word);
    EXPECT_TRUE(comes(first) && comes(second));
  }
}

// A stream that waits for another one's event at the head of its queue blocks the queue, too.
TEST_F(SimulatedQueues, AnEventIsWaitedForAtTheHead) {
  set_fair_queues(2);
  int *word = pinned_ints(1), *memory = device_ints(1);
  // The third stream has the first one's queue.
  const cudaStream_t first = stream(), other = stream(), third = stream();
  const cudaEvent_t late = event();
  wait_for_word(other, word);
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(late, other));
  EXPECT_CUDA(cudaSuccess, cudaStreamWaitEvent(first, late, 0));
  EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(memory, 0, 4, third));
  EXPECT_FALSE(comes_by_itself(third));
  write(word);
  EXPECT_TRUE(comes(third));
}

TEST_F(SimulatedQueues, WhatRunsHoldsUpOnlyItsOwnStream) {
  simulated::set_queues(1);
  std::atomic<bool> go = false;
  int *memory = device_ints(2);
  const cudaStream_t first = stream(), second = stream();
  EXPECT_CUDA(cudaSuccess, simulated::enqueue(first, [&] {
                while (!go) std::this_thread::sleep_for(1ms);
              }));
  EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(memory, 0, 4, second));
  EXPECT_TRUE(comes(second));
  EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(memory + 1, 0, 4, first));  // waits at the head for the kernel
  EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(memory, 0, 4, second));
  EXPECT_FALSE(comes_by_itself(second));
  go = true;
  EXPECT_TRUE(comes(second));
}

// Makes streams until one shares the queue of the first stream, which waits. Their number is the number of queues.
TEST_F(SimulatedQueues, ThereAreAsManyAsCudasVariableSays) {
  const auto streams_apart = [] {
    simulated::reset();
    simulated::set_fair_queues(true);
    int *word = pinned_ints(1), *memory = device_ints(1);
    const cudaStream_t first = stream();
    wait_for_word(first, word);
    size_t apart = 1;
    for (cudaStream_t next = stream(); apart < 50; next = stream(), ++apart) {
      EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(memory, 0, 4, next));
      if (!comes_by_itself(next)) break;
    }
    write(word);
    EXPECT_TRUE(comes(first));
    return apart;
  };
  EXPECT_EQ(streams_apart(), 8U);
  for (const auto &[text, count] : {std::pair{"3", 3U}, std::pair{"99", 32U}, std::pair{"0", 8U}}) {
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", text, 1);
    EXPECT_EQ(streams_apart(), count) << text;
  }
}

// A caller blocks as soon as the stream has no room for another piece of work.
TEST_F(SimulatedQueues, AStreamThatIsFullHoldsItsCaller) {
  for (const uint64_t room : {3, 0}) {
    simulated::reset();
    simulated::set_stream_room(room);
    int *word = pinned_ints(1), *memory = device_ints(1);
    const cudaStream_t first = stream();
    wait_for_word(first, word);
    {
      const fsdp::test::OwnThread brings([&] {
        for (int i = 0; i < 5; ++i) EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(memory, 0, 4, first));
      });
      EXPECT_TRUE(room ? brings.waits() : brings.returns());
      write(word);
    }
    EXPECT_TRUE(comes(first));
  }
}

// A destroyed stream leaves its place in the queue to the next stream, and its enqueued work is done first.
TEST_F(SimulatedQueues, DestroyedStreamsCountNoMore) {
  set_fair_queues(2);
  int *word = pinned_ints(1), *memory = device_ints(1);
  const cudaStream_t first = stream(), second = stream();
  EXPECT_CUDA(cudaSuccess, cudaStreamDestroy(second));
  wait_for_word(first, word);
  const cudaStream_t third = stream();
  EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(memory, 0, 4, third));
  EXPECT_TRUE(comes(third));
  write(word);
  EXPECT_TRUE(comes(first));
}

// CUDA does not say which queue a stream gets. On an H200, two ranks that were threads with 32 queues and 20 streams
// waited in a circle.
TEST_F(SimulatedQueues, FewStreamsShareThemTooUnlessTheyAreFair) {
  for (const bool fair : {false, true}) {
    simulated::set_queues(32);
    simulated::set_fair_queues(fair);
    std::vector<cudaStream_t> streams(20);
    for (cudaStream_t &one : streams) one = stream();
    size_t sharing = 0;
    for (size_t i = 0; i < streams.size(); ++i)
      for (size_t j = 0; j < i; ++j) sharing += simulated::share_queue(streams[i], streams[j]);
    EXPECT_EQ(sharing > 0, !fair) << sharing;
  }
  simulated::set_queues(0);
  EXPECT_FALSE(simulated::share_queue(stream(), stream()));
}

TEST_F(SimulatedQueues, ProgramsMaySetTheirNumber) {
  EXPECT_FALSE(simulated::parse_settings("strict=1")->queues.has_value());
  EXPECT_EQ(simulated::parse_settings("queues=0")->queues, 0U);
  EXPECT_EQ(simulated::parse_settings("devices=2,queues=5")->queues, 5U);
  EXPECT_EQ(simulated::parse_settings("queues=5")->fair_queues, 0U);
  EXPECT_EQ(simulated::parse_settings("fair_queues=1")->fair_queues, 1U);
}

}  // namespace
