// SPDX-License-Identifier: Apache-2.0
// Tests how NCCL's communicators end when a job has failed. Whatever an abort waits for, GPUs are freed and callers go
// on.
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "nccl_bench.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

// ncclCommAbort waits for all kernels of the GPU, and those of another communicator wait until it is aborted itself.
TEST_F(NcclTest, AllCommunicatorsOfAGpuAreAbortedAtOnce) {
  for (const int64_t version : {22907, 23203}) {  // ordered by events, and by NCCL
    control().set(Knob::version, version);
    expect_well(run_ranks({2}, [](NcclRank &mine) {
      Bench bench(mine);
      const auto other = mine.team->create_collectives("reduce");
      const auto reduces = mine.device->create_stream("reduce");
      if (mine.rank() == 0) {
        bench.gather();
        other->barrier({2, "end"}, *reduces);
      }
      mine.meet();  // no rank fails before all is enqueued
      std::this_thread::sleep_for(100ms);
      mine.fail_with_all();
      expect_freed(mine, *bench.stream, 1);
      expect_freed(mine, *reduces, 1);
    }));
  }
  EXPECT_EQ(control().count(Count::aborts), 8);
}

// No abort ends the waits of copy engines, so they are used only on request.
TEST_F(NcclTest, AGatherOverWindowsNoticesAnAbort) {
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    mine.team->register_memory(bench.pool->data(), bench.pool->size_bytes(), "pool");
    if (mine.rank() == 0) {
      EXPECT_EQ(control().count(Count::windows), 4);
      bench.gather();
    }
    mine.meet();
    mine.fail_with_all();
    expect_freed(mine, *bench.stream, 1);
    if (mine.rank() == 0) control().set(Knob::let_copies_go, 1);
  }));
}

// From 2.29.2 on NCCL itself uses copy engines for large gathers over windows, if the GPUs support it. With such
// versions windows are used only on request, or if NCCL is prevented from doing so.
TEST_F(NcclTest, ALargeGatherOnABlackwellNoticesAnAbort) {
  simulated::set_device_count(2);
  simulated::set_compute_capability(10);
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    EXPECT_NE(mine.team->notes().at(0).text.find("NCCL_SYM_CE_THRESHOLD=1099511627776 keeps it from that"),
              std::string::npos);
    Bench bench(mine, uint64_t{9} << 20);
    mine.team->register_memory(bench.pool->data(), bench.pool->size_bytes(), "pool");
    EXPECT_EQ(control().count(Count::windows), 0);
    if (mine.rank() == 0) bench.gather();
    mine.meet();
    mine.fail_with_all();
    expect_freed(mine, *bench.stream, 1);
    if (mine.rank() == 0) control().set(Knob::let_copies_go, 1);
  }));
}

TEST_F(NcclTest, OnABlackwellWindowsAreUsedWhereTheyCannotHang) {
  simulated::set_device_count(2);
  simulated::set_compute_capability(10);
  struct Case {
    const char *windows, *threshold;
    int64_t version, count;
    const char *note;
  };
  for (const Case &one : {Case{nullptr, nullptr, 22907, 0, nullptr}, Case{nullptr, "1099511627776", 22907, 2, nullptr},
                          Case{nullptr, "1000", 22907, 0, nullptr}, Case{"1", nullptr, 22901, 2, "before NCCL 2.29.7"},
                          Case{"1", nullptr, 22907, 2, "that NCCL takes for large gathers"}}) {
    one.windows ? ::setenv("FSDP_NCCL_WINDOWS", one.windows, 1) : ::unsetenv("FSDP_NCCL_WINDOWS");
    one.threshold ? ::setenv("NCCL_SYM_CE_THRESHOLD", one.threshold, 1) : ::unsetenv("NCCL_SYM_CE_THRESHOLD");
    control().set(Knob::version, one.version);
    expect_well(run_ranks({2}, [&](NcclRank &mine) {
      const auto arena = mine.team->create_parts(4096, "weights");
      const auto gather = mine.team->create_collectives("gather");
      mine.meet();
      EXPECT_EQ(control().count(Count::windows), one.count) << one.version;
      const auto notes = mine.team->notes();
      EXPECT_EQ(notes.size(), one.note ? 2U : 1U);
      EXPECT_NE(notes.back().text.find(one.note ? one.note : "NCCL"), std::string::npos) << notes.back().text;
      mine.meet();
    }));
  }
}

// NCCL may write a communicator's handle after the call that makes it has returned.
TEST_F(NcclTest, AHandleMayComeLate) {
  control().set(Knob::late_handle_ms, 200);
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    bench.gather();
    mine.synchronize(*bench.stream);
  }));
  EXPECT_EQ(control().count(Count::finished), 2);
}

TEST_F(NcclTest, ACommunicatorThatIsBeingMadeIsAborted) {
  for (const int64_t late_ms : {0, 500}) {
    control().set(Knob::late_handle_ms, late_ms);
    control().set(Knob::hang_init_rank, 2);
    const auto start = std::chrono::steady_clock::now();
    std::atomic<bool> both = false;  // these exist; one of them may have ended since
    for (const Error &error : run_ranks({2}, [&](NcclRank &mine) {
           std::thread fails([&] {
             const auto waits = std::chrono::steady_clock::now();
             while (!both && seconds_since(waits) < 10) {
               std::this_thread::sleep_for(1ms);
               if (control().count(Count::communicators) == 2) both = true;
             }
             mine.failure.set(Error(FSDP_ABORTED, "the test aborts"));
           });
           const Error error = error_of([&] { Bench bench(mine); });
           fails.join();
           throw error;
         }))
      EXPECT_TRUE(has(error, "the test aborts")) << error.message;
    EXPECT_LT(seconds_since(start), 6);
    EXPECT_EQ(control().count(Count::communicators), 0) << late_ms;
  }
  EXPECT_EQ(control().count(Count::aborts), 4);
}

// NCCL's own thread may be blocked in CUDA.
TEST_F(NcclTest, ALaunchThatDoesNotReturnEndsWithTheJob) {
  control().set(Knob::hang_launch, 1);
  const auto problems = run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    std::thread fails([&] {
      std::this_thread::sleep_for(200ms);
      mine.failure.set(Error(FSDP_ABORTED, "the test aborts"));
    });
    const auto start = std::chrono::steady_clock::now();
    (void)error_of([&] { bench.gather(); });
    EXPECT_LT(seconds_since(start), 5);
    fails.join();
    expect_freed(mine, *bench.stream, 1);
  });
  expect_well(problems);
}

// Makes a stream with a full queue, so that enqueueing blocks.
class FullStream final : public device::Stream {
 public:
  explicit FullStream(device::Stream &stream) : stream_(stream) {}
  void let_go() {
    const std::lock_guard lock(mutex_);
    full_ = false;
    changed_.notify_all();
  }
  void record(device::Event &event) override {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, 20s, [&] { return !full_; });
    }
    stream_.record(event);
  }
  void wait(const device::Event &event) override { stream_.wait(event); }
  void run(const device::Task &) override {}
  void copy(void *, const void *, size_t) override {}
  void fill(void *, uint8_t, size_t) override {}
  void cast(void *, fsdp_dtype, const void *, fsdp_dtype, uint64_t) override {}
  void add(void *, fsdp_dtype, const void *, fsdp_dtype, uint64_t) override {}
  void scale_all(std::span<const device::FloatSpan>, float) override {}
  void rank_sum(const device::RankSum &) override {}
  void sum_all_squares(std::span<const device::SquaresSpan>) override {}
  void sum_all_compact_squares(std::span<const device::CompactSquaresSpan>) override {}
  void count_nonfinite(uint64_t *, const float *, uint64_t) override {}
  void count_zeros(uint64_t *, const float *, uint64_t) override {}
  void adamw(const device::AdamW &, std::span<const device::AdamWSpan>) override {}
  void sum_values(double *, const double *, uint64_t) override {}
  void find_norm(device::Norm *, const device::NormShares &) override {}
  void scale_all_by(std::span<const device::FloatSpan>, const float *) override {}
  void adamw_from(const device::AdamW *, std::span<const device::AdamWSpan>) override {}
  void compact_adamw(const device::AdamW &, std::span<const device::CompactSpan>) override {}
  void compact_adamw_from(const device::AdamW *, std::span<const device::CompactSpan>) override {}
  void store_step(device::AdamW *, const device::AdamW &) override {}
  void round_randomly(const device::RandomRounding &) override {}
  void quantize_all_mxfp8(std::span<const device::Mxfp8Quantize>, uint64_t *) override {}
  void swizzle_scales(const device::Mxfp8Swizzle &) override {}
  void quantize_all_fp8_blocks(std::span<const device::Fp8BlockQuantize>, uint64_t *) override {}
  void find_all_amaxes(std::span<const device::AmaxSpan>) override {}
  void find_fp8_scales(const device::Fp8Scales &) override {}
  void quantize_all_fp8(std::span<const device::Fp8Quantize>) override {}
  fsdp_stream handle() const noexcept override { return stream_.handle(); }

 private:
  device::Stream &stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool full_ = true;
};

// The guard finds the collective that does not end, and ends it, while it keeps the caller blocked in CUDA.
TEST_F(NcclTest, ACallerThatCudaHoldsUpIsFreed) {
  const auto problems = run_ranks({2, 4000}, [](NcclRank &mine) {
    Bench bench(mine);
    if (mine.rank() == 0) {
      bench.gather();
      FullStream full(*bench.stream);
      std::thread caller([&] {
        const Gather span{Part::in(*bench.arena, 0, Bench::part, bench.rank), bench.pool->data(), Bench::part};
        (void)error_of([&] { bench.communicator->gather({&span, 1}, {1, "layer.4"}, full); });
      });
      const auto start = std::chrono::steady_clock::now();
      while (!mine.failure.failed() && seconds_since(start) < 12) std::this_thread::sleep_for(1ms);
      EXPECT_LT(seconds_since(start), 8);
      expect_freed(mine, *bench.stream, 1);
      full.let_go();
      caller.join();
      mine.failure.check();
    }
    while (!mine.failure.failed()) std::this_thread::sleep_for(1ms);
  });
  EXPECT_EQ(problems[0].status, FSDP_TIMEOUT) << problems[0].message;
  EXPECT_TRUE(has(problems[0], "all_gather of 'layer.3'")) << problems[0].message;
}

TEST_F(NcclTest, ACommunicatorEndsInGoodOrderAfterItsGraphs) {
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    { const GatherGraph graph(mine, bench); }
    bench.communicator.reset();
    EXPECT_TRUE(mine.team->take_news().empty());
  }));
  EXPECT_EQ(control().count(Count::finished), 2);
}

// NCCL does not end a communicator before the graphs that captured its work are destroyed.
TEST_F(NcclTest, AGraphThatOutlivesItsCommunicatorIsNamed) {
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    GatherGraph graph(mine, bench);
    const auto start = std::chrono::steady_clock::now();
    bench.communicator.reset();
    EXPECT_LT(seconds_since(start), 8);
    const auto news = mine.team->take_news();
    ASSERT_EQ(news.size(), 1U);
    EXPECT_EQ(news[0].level, FSDP_LOG_WARNING);
    EXPECT_NE(
        news[0].text.find("'gather' of rank " + std::to_string(mine.rank()) + " cannot end: graphs that captured"),
        std::string::npos)
        << news[0].text;
    mine.meet();
    graph.destroy();
    while (control().count(Count::communicators) > 0 && seconds_since(start) < 10) std::this_thread::sleep_for(1ms);
  }));
}

// A graph of a communicator that was replaced would launch into nothing.
TEST_F(NcclTest, GraphsDoNotSurviveARoundThatIsAborted) {
  const auto problems = run_ranks({2, 4000}, [](NcclRank &mine) {
    Bench bench(mine);
    GatherGraph graph(mine, bench);
    if (mine.rank() == 0) bench.gather();
    bench.communicator->abandon();
    const Error error = error_of([&] { bench.communicator->next_round(); });
    expect_freed(mine, *bench.stream, 1);
    graph.destroy();
    throw error;
  });
  for (const Error &error : problems) {
    EXPECT_EQ(error.status, FSDP_INVALID_STATE) << error.message;
    EXPECT_TRUE(has(error, "graphs have captured work of NCCL communicator 'gather'")) << error.message;
  }
}

// The rank whose communicator is the last of its process to end waits for the graphs of all ranks.
TEST_F(NcclTest, TheRankWhoseGraphsHoldAPeersCommunicatorIsNamed) {
  control().set(Knob::abort_rank, 2);
  control().set(Knob::abort_ms, 300);
  const auto problems = run_ranks({2, 2000}, [](NcclRank &mine) {
    Bench bench(mine);
    std::unique_ptr<GatherGraph> graph;
    if (mine.rank() == 0) {
      graph = std::make_unique<GatherGraph>(mine, bench);
      bench.gather();
    }
    bench.communicator->abandon();
    const Error error = error_of([&] { bench.communicator->next_round(); });
    if (graph) graph->destroy();
    throw error;
  });
  for (const Error &error : problems) {
    EXPECT_EQ(error.status, FSDP_INVALID_STATE) << error.message;
    EXPECT_TRUE(has(error, "rank 1: graphs have captured work of NCCL communicator 'gather' on rank 0"))
        << error.message;
  }
}

}  // namespace
}  // namespace fsdp::transport::test
