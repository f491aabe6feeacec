// SPDX-License-Identifier: Apache-2.0
// Tests memory that is registered with NCCL, and memory that NCCL refuses.
#include "nccl_bench.h"

namespace fsdp::transport::test {
namespace {

// Makes one gather, which works, and returns the logged lines.
std::vector<Note> gather_once(NcclRank &mine) {
  Bench bench(mine);
  mine.team->register_memory(bench.pool->data(), bench.pool->size_bytes(), "pool");
  std::memset(bench.arena->writable() + mine.rank() * Bench::part, static_cast<int>(mine.rank() + 1), Bench::part);
  bench.gather();
  mine.synchronize(*bench.stream);
  EXPECT_EQ(mine.read<uint8_t>(bench.pool->data() + Bench::part, 1)[0], 2);
  return mine.team->take_news();
}

void expect_told(const std::vector<Note> &news, const char *why) {
  ASSERT_EQ(news.size(), 1U);
  EXPECT_EQ(news[0].level, FSDP_LOG_WARNING);
  EXPECT_NE(news[0].text.find("memory that is not registered"), std::string::npos) << news[0].text;
  EXPECT_NE(news[0].text.find(why), std::string::npos) << news[0].text;
}

TEST_F(NcclTest, MemoryIsRegisteredAsTheVersionHasIt) {
  struct Case {
    int64_t version;
    const char *windows;
    Count kind;
  };
  for (const Case &one :
       {Case{22907, nullptr, Count::windows}, Case{22809, nullptr, Count::buffers}, Case{22809, "1", Count::windows},
        Case{22403, "1", Count::buffers}, Case{23203, nullptr, Count::windows}, Case{23203, "0", Count::buffers}}) {
    control().set(Knob::version, one.version);
    one.windows ? ::setenv("FSDP_NCCL_WINDOWS", one.windows, 1) : ::unsetenv("FSDP_NCCL_WINDOWS");
    expect_well(run_ranks({2}, [&](NcclRank &mine) {
      const auto early = mine.team->create_parts(4096, "early");
      const auto gather = mine.team->create_collectives("gather");
      const auto late = mine.team->create_parts(8192, "late");
      mine.meet();
      EXPECT_EQ(control().count(one.kind), 4) << one.version;
      const bool deaf = one.version == 22809 && one.windows;
      EXPECT_EQ(mine.team->notes().size(), deaf ? 2U : 1U) << one.version;
      EXPECT_EQ(deaf,
                mine.team->notes().back().text.find("windows before NCCL 2.29.7 do not notice") != std::string::npos);
      mine.meet();
    }));
  }
}

TEST_F(NcclTest, CopyEnginesThatTheEnvironmentAsksNcclForAreWarnedOf) {
  for (const std::string policy : {"EFFICIENCY", "1", "ZERO", "2", "3", "0x2"}) {
    ::setenv("NCCL_CTA_POLICY", policy.c_str(), 1);
    expect_well(run_ranks({2}, [&](NcclRank &mine) {
      const bool told =
          mine.team->notes().back().text.find("gathers by copy engines do not notice") != std::string::npos;
      EXPECT_EQ(told, policy != "EFFICIENCY" && policy != "1") << policy;
    }));
  }
}

// Kernels over windows notice no abort, so windows serve copy engines only. Without copy engines no window is made.
TEST_F(NcclTest, CopyEnginesThatNcclDoesNotHaveChangeNothing) {
  control().set(Knob::version, 22703);
  ::setenv("FSDP_NCCL_COPY_ENGINES", "1", 1);
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    EXPECT_EQ(mine.team->notes().size(), 1U);
    const auto arena = mine.team->create_parts(4096, "weights");
    const auto gather = mine.team->create_collectives("gather");
    EXPECT_EQ(control().count(Count::windows), 0);
    mine.meet();
  }));
}

// NCCL refuses the window of one rank, or of all ranks. The windows of other ranks alone would be useless.
TEST_F(NcclTest, WhereWindowsAreRefusedThereAreBuffers) {
  for (const int64_t rank : {0, 2}) {
    control().reset();
    control().set(Knob::refuse_windows, 1);
    control().set(Knob::refuse_rank, rank);
    expect_well(run_ranks({2}, [&](NcclRank &mine) {
      const std::vector<Note> news = gather_once(mine);
      ASSERT_EQ(news.size(), 1U);
      EXPECT_EQ(news[0].level, FSDP_LOG_INFO);
      const char *why = rank == 0 || mine.rank() == 1 ? "NCCL has no use for such memory" : "another rank's cannot be";
      for (const char *word : {"registered as buffers instead of windows: rank ", why})
        EXPECT_NE(news[0].text.find(word), std::string::npos) << news[0].text;
    }));
    EXPECT_EQ(control().count(Count::registered_collectives), 0);
    EXPECT_EQ(control().count(Count::buffered_collectives), 2);
    expect_well(run_ranks({2}, [](NcclRank &mine) {
      const auto arena = mine.team->create_parts(4096, "weights");
      const auto gather = mine.team->create_collectives("gather");
      mine.meet();
      EXPECT_EQ(control().count(Count::windows), 0);
      EXPECT_EQ(control().count(Count::buffers), 2);
      mine.meet();
    }));
    EXPECT_EQ(control().count(Count::aborts), 0);
  }
}

// A container that makes no handles behaves like this.
TEST_F(NcclTest, WhatPeersCannotMapIsRegisteredAsBuffers) {
  simulated::set_files(false);
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    EXPECT_NE(mine.device->description().find("cuMemCreate, not exportable"), std::string::npos);
    const std::vector<Note> news = gather_once(mine);
    ASSERT_EQ(news.size(), 1U);
    EXPECT_NE(news[0].text.find("registered as buffers instead of windows"), std::string::npos) << news[0].text;
    EXPECT_NE(news[0].text.find("memory without a handle for peers"), std::string::npos) << news[0].text;
  }));
  EXPECT_EQ(control().count(Count::buffered_collectives), 2);
}

TEST_F(NcclTest, WhereBothAreRefusedMemoryIsCopied) {
  control().set(Knob::refuse_windows, 1);
  control().set(Knob::buffer_error, 2);
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    const std::vector<Note> news = gather_once(mine);
    ASSERT_EQ(news.size(), 2U);
    expect_told({news[1]}, "ncclCommRegister returned 2");
  }));
  EXPECT_EQ(control().count(Count::buffered_collectives), 0);
}

// NCCL keeps the error of a window on a communicator that does not block. Before 2.28 a blocking communicator is as
// good as aborted, and reports nothing. Either way the communicator is unusable afterwards.
TEST_F(NcclTest, ACommunicatorThatAWindowSpoiltIsMadeAnewWithout) {
  for (const bool blocking : {false, true}) {
    SetUp();
    ::setenv("FSDP_NCCL_BLOCKING", blocking ? "1" : "0", 1);
    if (blocking) ::setenv("FSDP_NCCL_WINDOWS", "1", 1);
    control().set(Knob::version, blocking ? 22707 : 0);
    control().set(Knob::window_error, 1);
    expect_well(run_ranks({2}, [](NcclRank &mine) {
      expect_told(gather_once(mine), "ncclCommWindowRegister returned 1");
      const auto next = mine.team->create_collectives("reduce");
      const auto stream = mine.device->create_stream("reduce");
      next->barrier({1, "end"}, *stream);
      mine.synchronize(*stream);
    }));
    EXPECT_EQ(control().count(Count::aborts), 2);
    EXPECT_EQ(control().count(Count::finished), 4);
  }
}

TEST_F(NcclTest, WhereAllWindowsFailThereAreBuffers) {
  control().set(Knob::window_error, 1);
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    const std::vector<Note> news = gather_once(mine);
    ASSERT_EQ(news.size(), 1U);
    for (const char *words : {"registered as buffers instead of windows", "ncclCommWindowRegister returned 1"})
      EXPECT_NE(news[0].text.find(words), std::string::npos) << news[0].text;
  }));
  EXPECT_EQ(control().count(Count::buffered_collectives), 2);
  EXPECT_EQ(control().count(Count::aborts), 0);
}

TEST_F(NcclTest, AWindowThatOneRankSpoilsHoldsNoRankUp) {
  control().set(Knob::window_error, 1);
  control().set(Knob::window_error_rank, 2);
  const auto start = std::chrono::steady_clock::now();
  expect_well(run_ranks({2, 4000}, [](NcclRank &mine) {
    expect_told(gather_once(mine), mine.rank() == 1 ? "ncclCommWindowRegister returned 1"
                                                    : "ncclCommWindowRegister of NCCL 2.32.3 was still in progress");
  }));
  EXPECT_LT(seconds_since(start), 10);
}

// Before 2.24 NCCL finds such memory by its address. The look-alike checks that.
TEST_F(NcclTest, MemoryOfARankIsOpenToTheGpusOfItsProcess) {
  control().set(Knob::version, 22304);
  expect_well(run_ranks({3}, [](NcclRank &mine) { (void)gather_once(mine); }));
  simulated::set_peers(false);
  expect_well(run_ranks({1}, [](NcclRank &mine) {
    EXPECT_EQ(mine.device->description().find("for this GPU alone"), std::string::npos);
  }));
}

TEST_F(NcclTest, BuffersThatAreRefusedAreCopied) {
  control().set(Knob::version, 22403);
  control().set(Knob::buffer_error, 2);
  expect_well(run_ranks({2}, [](NcclRank &mine) { expect_told(gather_once(mine), "ncclCommRegister returned 2"); }));
  EXPECT_EQ(control().count(Count::aborts), 0);
}

}  // namespace
}  // namespace fsdp::transport::test
