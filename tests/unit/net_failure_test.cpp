// SPDX-License-Identifier: Apache-2.0
// Tests messages between hosts that cannot complete. The rank to blame is named in bounded time, and no operation
// remains in progress.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <barrier>
#include <csignal>
#include <latch>

#include "net_ranks.h"
#include "transport/message/tcp/transport.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

void sum_long(MessageBench &bench, std::vector<float> &values, const char *name) {
  const Sum span = everywhere_in_place(values.data(), values.size());
  bench.communicator->sum(std::span(&span, 1), false, {1, name}, *bench.stream);
}

std::vector<Error> errors_of(uint32_t size, const std::function<void(NetRank &)> &body,
                             const RankOptions &options = {}) {
  std::vector<Error> seen(size, Error(FSDP_OK, ""));
  std::barrier bodies(size);
  run_threads(
      size,
      [&](Rank &rank) {
        std::unique_ptr<NetRank> mine;
        seen[rank.rank()] = error_of([&] {
          mine = std::make_unique<NetRank>(rank);
          body(*mine);
        });
        bodies.arrive_and_wait();  // if a rank left earlier, the others would fail because of that
      },
      options);
  return seen;
}

TEST(NetFailure, DifferentCallsAreNamed) {
  const auto seen = errors_of(3, [](NetRank &mine) {
    std::vector<float> values(mine.rank.rank() == 2 ? 200'001 : 200'000);
    MessageBench bench = mine.bench();
    sum_long(bench, values, "outer");
    bench.finish();
  });
  for (const Error &error : seen) {
    EXPECT_EQ(error.status, FSDP_MISMATCH) << error.message;
    EXPECT_EQ(error.rank, 2) << error.message;
    EXPECT_NE(error.message.find("rank 2 called all_reduce of 'outer' (#0, float32, 200001 elements)"),
              std::string::npos)
        << error.message;
    EXPECT_NE(error.message.find("called all_reduce of 'outer' (#0, float32, 200000 elements)"), std::string::npos)
        << error.message;
  }
}

TEST(NetFailure, DifferentExchangesAreNamed) {
  const auto seen = errors_of(2, [](NetRank &mine) {
    uint64_t value = 0, all[2];
    mine.net->exchange(mine.all, exchanges_key, &value, sizeof value, all, mine.rank.rank() ? "norm" : "seal");
  });
  for (const Error &error : seen) {
    EXPECT_EQ(error.status, FSDP_MISMATCH) << error.message;
    EXPECT_EQ(error.rank, 1) << error.message;
    EXPECT_NE(error.message.find("'seal'"), std::string::npos) << error.message;
    EXPECT_NE(error.message.find("'norm'"), std::string::npos) << error.message;
  }
}

TEST(NetFailure, DifferentChunksAreNamed) {
  const auto codes = await_processes(start_processes(2, [](Rank &rank) {
    if (rank.rank() == 1) ::setenv("FSDP_NET_CHUNK_BYTES", "8192", 1);
    const Error error = error_of([&] {
      NetRank mine(rank);
      std::vector<float> values(1000);
      MessageBench bench = mine.bench();
      sum_long(bench, values, "outer");
      bench.finish();
    });
    require(error.status == FSDP_MISMATCH, error.message);
    require(error.message.find("rank 0 has chunks of 61440 bytes, rank 1 of 8192: FSDP_NET_CHUNK_BYTES differs") !=
                std::string::npos,
            error.message);
  }));
  EXPECT_EQ(codes, (std::vector<int>{0, 0}));
}

TEST(NetFailure, TimeoutNamesTheRankThatHasNotCome) {
  RankOptions options;
  options.timeout_ms = 3000;
  std::latch over(2);
  const auto seen = errors_of(
      3,
      [&over](NetRank &mine) {
        MessageBench bench = mine.bench();
        if (mine.rank.rank() == 1) return over.wait();
        // The call is on the caller's thread, because if its stream were late, the caller would time out first.
        const Error error = error_of([&] {
          bench.communicator->barrier({1, "layer.3"}, mine.rank.device->caller_stream(nullptr));
        });
        over.arrive_and_wait();
        throw error;
      },
      options);
  for (const uint32_t r : {0, 2}) {
    EXPECT_EQ(seen[r].status, FSDP_TIMEOUT);
    EXPECT_EQ(seen[r].rank, 1);
    EXPECT_EQ(seen[r].message, "barrier of 'layer.3' (#0): rank 1 has not come within 3000 ms");
  }
}

TEST(NetFailure, ALateRankIsWaitedFor) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    if (rank.rank() == 1) std::this_thread::sleep_for(700ms);
    MessageBench bench = mine.bench();
    if (rank.rank() == 2) std::this_thread::sleep_for(300ms);
    check_messages(bench, 3, {100'003});
    // A rank that has done its part may do other work for a long time. The others still receive its bytes.
    if (rank.rank() == 0) std::this_thread::sleep_for(500ms);
    rank.meet();
  }));
}

TEST(NetFailure, AbandonInTheMiddle) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    MessageBench bench = mine.bench();
    abandon_in_the_middle(bench, 9, std::chrono::microseconds(700));
    rank.meet();
  }));
}

TEST(NetFailure, AnEarlyEndIsAMismatch) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    std::vector<float> values(1000);
    MessageBench bench = mine.bench();
    for (int i = 0; i < (rank.rank() == 1 ? 1 : 2); ++i) sum_long(bench, values, "outer");
    bench.communicator->quiesce();
    bench.finish();
    const auto broken = bench.communicator->broken();
    if (rank.rank() == 1)
      require(!broken, "the early rank did all that it began");
    else
      require(broken && broken->status == FSDP_MISMATCH && broken->rank == 1, broken ? broken->message : "not broken");
    rank.meet();
  }));
}

TEST(NetFailure, ADeadRankIsNamed) {
  void *memory = ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto &survivors = *new (memory) std::atomic<int>(0);
  const auto codes = await_processes(start_processes(3, [&survivors](Rank &rank) {
    NetRank mine(rank);
    std::vector<float> values(4'000'000, 1.0F);
    MessageBench bench = mine.bench();
    auto start = std::chrono::steady_clock::now();
    const Error error = error_of([&] {
      for (int i = 0; i < 2'000; ++i) {
        start = std::chrono::steady_clock::now();
        sum_long(bench, values, "long");
        if (rank.rank() == 1 && i == 3) {
          std::this_thread::sleep_for(5ms);  // data is in transit
          ::kill(::getpid(), SIGKILL);
        }
        bench.finish();
      }
    });
    const double seconds = seconds_since(start);
    // If one rank left earlier, the other would fail because of that.
    ++survivors;
    for (int ms = 0; survivors < 2 && ms < 10'000; ++ms) std::this_thread::sleep_for(1ms);
    require(error.status == FSDP_PEER_FAILED && error.rank == 1, error.message);
    require(error.message.find(over_ucx() ? "rank 1 cannot be reached: UCX" : "rank 1 cannot be reached: TCP to 127") !=
                std::string::npos,
            error.message);
    require(error.origin == (over_ucx() ? FSDP_ORIGIN_UCX : FSDP_ORIGIN_OS), fmt::format("origin {}", error.origin));
    require(seconds < patience_seconds, "the death was noticed late");
  }));
  EXPECT_EQ(codes, (std::vector<int>{0, -SIGKILL, 0}));
  ::munmap(memory, sizeof survivors);
}

// One rank's failure ends its call at any point. Its net then ends in bounded time, and so do its peers' calls.
TEST(NetFailure, TheEndWithWorkUnderWay) {
  for (int delay = 0; delay < 4; ++delay) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<Error> seen(2, Error(FSDP_OK, ""));
    run_threads(2, [&](Rank &rank) {
      auto mine = std::make_unique<NetRank>(rank);
      seen[rank.rank()] = error_of([&] {
        std::vector<float> values(8'000'000, 1.0F);
        MessageBench bench = mine->bench();
        // This work takes much longer than the delay, even if a loaded machine wakes this thread late.
        for (int i = 0; i < 40; ++i) sum_long(bench, values, "long");
        if (rank.rank() == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2 * delay));
          rank.failure.set(Error(FSDP_ABORTED, "enough"));
        }
        try {
          bench.finish();
        } catch (const Error &) {
          bench.stream.reset();
          throw;
        }
      });
      mine.reset();
    });
    EXPECT_EQ(seen[0].status, FSDP_ABORTED) << seen[0].message;
    EXPECT_EQ(seen[1].status, FSDP_PEER_FAILED) << seen[1].message;
    EXPECT_EQ(seen[1].rank, 0);
    EXPECT_LT(seconds_since(start), 15) << "of 20 until a wait ends by itself; sanitizers on loaded machines take half";
  }
}

messages::Header word_of(uint32_t rank) {
  messages::Header header{};
  header.magic = messages::header_magic;
  header.kind = messages::Kind::call;
  header.from = rank;
  header.key = messages_key;
  header.number = 5;
  return header;
}

// Makes one of two ranks, connected to the other.
struct Talker {
  explicit Talker(Rank &rank)
      : seat(create_lone_seat(rank.rank(), 2, rank.waiter, rank.failure)),
        net(rank.rank(), "127.0.0.1", {false, true}) {
    net.join(test_job(rank.team->all_gather(net.address(), "addresses")), seat);
    auto lock = net.lock();
    net.add(messages_key, ear);
    net.greet(1 - rank.rank());
    await(lock, [&] { return net.connected(1 - rank.rank()); });
  }
  ~Talker() {
    const auto lock = net.lock();
    net.remove(messages_key);
  }
  template <class Lock, class Come>
  void await(Lock &lock, Come come) {
    require(net.changed().wait_for(lock, 20s, come), "nothing has come");
  }
  std::shared_ptr<Seat> seat;
  tcp::TcpTransport net;
  Ear ear;
};

// A rank that gives up a call at once has told its peers which call it made. With TLS it waits for the thread that
// sends this message and then ends the connection.
TEST(NetFailure, WhatWasSaidBeforeAnEndIsHeard) {
  if (over_ucx()) GTEST_SKIP() << "of TCP";
  expect_well(run_threads(2, [](Rank &rank) {
    Talker talker(rank);
    rank.meet();
    if (rank.rank() == 0) {
      const auto lock = talker.net.lock();
      talker.net.send_control(1, word_of(0), nullptr, 0);
      talker.net.cut(1);
    } else {
      auto lock = talker.net.lock();
      talker.await(lock, [&] { return !talker.net.loss_of(0).text.empty(); });
      require(talker.ear.heard == 5, "the connection ended without a word");
    }
    rank.meet();
  }));
}

// The other end is healthy but silent, so no message ends the wait.
TEST(NetFailure, WhatCannotBeEncryptedFailsThePeerAtOnce) {
  if (over_ucx()) GTEST_SKIP() << "of TCP";
  void *library = ::dlopen(FAILING_SSL, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << ::dlerror();
  auto &failing = *static_cast<std::atomic<int> *>(::dlsym(library, "failing_ssl_writes"));
  ::setenv("FSDP_SSL_LIBRARY", FAILING_SSL, 1);
  expect_well(run_threads(2, [&](Rank &rank) {
    Talker talker(rank);
    rank.meet();
    if (rank.rank() == 0) {
      failing = 1;
      auto lock = talker.net.lock();
      talker.net.send_control(1, word_of(0), nullptr, 0);
      talker.await(lock, [&] { return !talker.net.loss_of(1).text.empty(); });
      const messages::PeerLoss &loss = talker.net.loss_of(1);
      require(loss.text.ends_with(": what goes from rank 0 to rank 1 cannot be encrypted: TLS: it cannot go on"),
              loss.text);
      require(loss.origin == FSDP_ORIGIN_OS && loss.code == EPROTO, loss.text);
      require(talker.ear.failed == 1, "nobody who waits for it is told");
    }
    rank.meet();
  }));
  failing = 0;
  ::unsetenv("FSDP_SSL_LIBRARY");
}

}  // namespace
}  // namespace fsdp::transport::test
