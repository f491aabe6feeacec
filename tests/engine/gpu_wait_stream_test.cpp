// SPDX-License-Identifier: Apache-2.0
// fsdp_wait_stream over simulated GPUs: it comes after the stream's work, and it ends by timeout, interruption and
// failure. Then the stream itself can end, since a failed context releases what it made the stream wait for.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "device.h"
#include "harness.h"
#include "simulated_cuda/simulated.h"

using namespace harness;

namespace {

Scenario staged(uint32_t ranks, uint32_t timeout_ms = 20'000) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, 0);
  setup.context.device = FSDP_DEVICE_CUDA;
  setup.context.device_transport = FSDP_TRANSPORT_STAGING;
  setup.context.timeout_ms = timeout_ms;
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  return setup;
}

// Work that ends when it is let go.
class Work {
 public:
  explicit Work(fsdp_stream stream) {
    require(simulated::enqueue(static_cast<cudaStream_t>(stream),
                               [this] {
                                 while (!go_) pause_ms(1);
                                 done_ = true;
                               }) == cudaSuccess,
            "a kernel");
    stream_ = static_cast<cudaStream_t>(stream);
  }
  ~Work() {
    go();
    cudaStreamSynchronize(stream_);
  }
  Work(const Work &) = delete;
  Work &operator=(const Work &) = delete;
  void go() { go_ = true; }
  bool done() const { return done_; }

 private:
  std::atomic<bool> go_{false}, done_{false};
  cudaStream_t stream_ = nullptr;
};

void run_one(const Scenario &setup, const std::function<void(fsdp_context *)> &body) {
  run_threads(setup, [&](uint32_t, fsdp_context *context) { body(context); });
}

TEST(WaitStream, ComesAfterTheWorkOfTheStream) {
  run_one(staged(1), [](fsdp_context *context) {
    Work work(stream());
    std::thread later([&] {
      pause_ms(100);
      work.go();
    });
    const fsdp_status status = fsdp_wait_stream(context, stream(), 0);
    const bool done = work.done();
    later.join();
    FSDP(status);
    EXPECT_TRUE(done);
    FSDP(fsdp_close_context(context));
  });
}

TEST(WaitStream, EndsByTheTimeout) {
  run_one(staged(1, 200), [](fsdp_context *context) {
    const Work work(stream());
    const double start = now();
    require_error(fsdp_wait_stream(context, stream(), 0), FSDP_TIMEOUT, {"the caller's stream", "200 ms"});
    EXPECT_LT(now() - start, 10);
    EXPECT_FALSE(work.done());
  });
}

// The caller's own limit: a kernel that takes long fails no rank.
TEST(WaitStream, EndsByTheCallersLimitAndTheContextGoesOn) {
  run_one(staged(1, 60'000), [](fsdp_context *context) {
    Work work(stream());
    const double start = now();
    require_error(fsdp_wait_stream(context, stream(), 100), FSDP_TIMEOUT,
                  {"fsdp_wait_stream", "rank 0", "timeout_ms = 100"});
    EXPECT_LT(now() - start, 10);
    fsdp_error error = FSDP_ERROR_INIT;
    FSDP(fsdp_get_last_error(context, &error));
    EXPECT_EQ(error.context_failed, 0);
    work.go();
    FSDP(fsdp_wait_stream(context, stream(), 30'000));
    EXPECT_TRUE(work.done());
    FSDP(fsdp_close_context(context));
  });
}

TEST(WaitStream, EndsByTheFlag) {
  int32_t flag = 0;
  Scenario setup = staged(1);
  setup.context.interrupted_flag = &flag;
  run_one(setup, [&](fsdp_context *context) {
    const Work work(stream());
    std::thread other([&] {
      pause_ms(100);
      __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
    });
    const fsdp_status status = fsdp_wait_stream(context, stream(), 0);
    other.join();
    require_error(status, FSDP_INTERRUPTED, {"interrupted flag"});
  });
}

TEST(WaitStream, EndsByTheHook) {
  Scenario setup = staged(1);
  static std::atomic<int> asked;
  asked = 0;
  static std::atomic<bool> waits;
  waits = false;
  setup.context.interrupted = [](void *) -> int32_t { return waits && ++asked == 3; };
  run_one(setup, [](fsdp_context *context) {
    const Work work(stream());
    waits = true;
    require_error(fsdp_wait_stream(context, stream(), 0), FSDP_INTERRUPTED, {"interrupted hook"});
  });
}

// Rank 0's stream waits for weights that rank 1 never sends.
TEST(WaitStream, EndsByAFailureAndThenTheStreamEndsToo) {
  const Scenario setup = staged(2);
  std::atomic<bool> waits{false};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    if (r == 1) {
      while (!waits) pause_ms(1);
      pause_ms(100);
      FSDP(fsdp_abort_context(context, "rank 1 has had enough"));
      return;
    }
    const auto own = static_cast<cudaStream_t>(stream());
    FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, stream()));
    EXPECT_EQ(cudaStreamQuery(own), cudaErrorNotReady);
    waits = true;
    require_error(fsdp_wait_stream(context, stream(), 0), FSDP_PEER_FAILED, {"rank 1 has had enough"});
    const double start = now();
    while (cudaStreamQuery(own) == cudaErrorNotReady && now() - start < 10) pause_ms(1);
    EXPECT_EQ(cudaStreamQuery(own), cudaSuccess);
  });
}

}  // namespace
