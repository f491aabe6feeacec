// SPDX-License-Identifier: Apache-2.0
// Tests short calls between hosts. Each rank sends each peer one message, and the thread that waits for the call reads
// it from the connection itself.
#include <gtest/gtest.h>
#include <time.h>

#include "library_threads.h"
#include "net_ranks.h"
#include "transport/message/tcp/transport.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

RankOptions on_calling_thread() {
  RankOptions options;
  options.device.overlap = false;
  return options;
}

void sum_in_place(MessageBench &bench, std::vector<float> &values) {
  const Sum span = everywhere_in_place(values.data(), values.size());
  bench.communicator->sum(std::span(&span, 1), false, {1, "summed"}, *bench.stream);
}

class NetShortCallsOf : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, NetShortCallsOf, testing::Values(2, 3, 5));

TEST_P(NetShortCallsOf, HaveTheBitsOfLongOnes) {
  expect_well(run_threads(GetParam(), [](Rank &rank) {
    NetRank mine(rank);
    MessageBench bench = mine.bench();
    const uint64_t most = net_short_bytes(rank.size()) / sizeof(float);
    uint64_t salt = 0;
    for (int round = 0; round < 2; ++round) {
      for (const std::vector<uint64_t> &counts :
           {std::vector{most}, {most + 1}, {most - 1, 1}, {1, most}, {0, 3, 0, 7}, {0}, {most / 2, most / 2}})
        check_message_all_reduce(bench, counts, ++salt * 10);
      for (const uint64_t bytes : {most * 4, most * 4 + 1, uint64_t{1}}) {
        check_message_all_gather(bench, {bytes, 3}, ++salt * 10);
        check_message_all_gather(bench, {bytes}, ++salt * 10);
        for (const uint32_t root : {0U, rank.size() - 1}) check_message_broadcast(bench, bytes, root, ++salt * 10);
      }
      end_round(bench);
    }
    rank.meet();
  }));
}

// Short calls set a timer of 2 ms. When it ends, each background thread may sleep twice: until no other thread drives,
// and until the next event. If short calls woke the threads, each call would add a sleep of each thread. The fastest of
// many batches counts, because the machine may be loaded.
TEST(NetShortCalls, WakeNoThreadOfTheTransport) {
  if (over_ucx()) GTEST_SKIP() << "of TCP";
  static constexpr uint64_t ranks = 2, calls = 100, batches = 20;
  expect_well(run_threads(
      ranks,
      [](Rank &rank) {
        NetRank mine(rank);
        MessageBench bench = mine.bench();
        std::vector<float> values(16, 0.0F);
        auto fastest = Clock::duration::max();
        uint64_t sleeps = 0;
        for (uint64_t batch = 0; batch < batches; ++batch) {
          const auto start = Clock::now();
          const uint64_t before = fsdp::test::sleeps_of("fsdp-tcp");
          for (uint64_t i = 0; i < calls; ++i) sum_in_place(bench, values);
          const auto time = Clock::now() - start;
          if (time >= fastest) continue;
          fastest = time;
          sleeps = fsdp::test::sleeps_of("fsdp-tcp") - before;
        }
        const uint64_t of_timers = 2 * ranks * static_cast<uint64_t>(fastest / 2ms + 1);
        require(sleeps <= calls / 2 + of_timers,
                fmt::format("{} sleeps in {} calls, of which timers explain {}", sleeps, calls, of_timers));
        bench.finish();
        rank.meet();
      },
      on_calling_thread()));
}

TEST(NetShortCalls, SleepWhileAPeerIsLate) {
  expect_well(run_threads(
      2,
      [](Rank &rank) {
        NetRank mine(rank);
        MessageBench bench = mine.bench();
        std::vector<float> values(16, 1.0F);
        for (int i = 0; i < 3; ++i) sum_in_place(bench, values);
        const auto cpu_time = [] {
          timespec time{};
          ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
          return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
        };
        if (rank.rank() == 1) std::this_thread::sleep_for(500ms);
        const auto before = cpu_time();
        sum_in_place(bench, values);
        require(cpu_time() - before < 250ms, "the thread does not sleep");
        bench.finish();
        rank.meet();
      },
      on_calling_thread()));
}

// While one thread waits for short calls and reads from the connections, another makes long calls.
TEST(NetShortCalls, OfOneThreadDoNotHoldUpLongOnesOfAnother) {
  expect_well(run_threads(3, [](Rank &rank) {
    NetRank mine(rank);
    MessageBench long_bench = mine.bench(messages_key), short_bench = mine.bench(messages_key + 10);
    const uint64_t count = 200'000;
    std::vector<std::vector<float>> large, small;
    const auto sum_all = [&](MessageBench &bench, std::vector<std::vector<float>> &values) {
      for (auto &one : values) sum_in_place(bench, one);
    };
    for (uint32_t i = 0; i < 8; ++i) large.push_back(rough_values(rank.rank(), count, i));
    for (uint32_t i = 0; i < 200; ++i) small.push_back(rough_values(rank.rank(), 16, 1000 + i));
    sum_all(long_bench, large);
    sum_all(short_bench, small);
    short_bench.finish();
    long_bench.finish();
    const auto check = [&](const std::vector<std::vector<float>> &values, uint64_t salt) {
      for (uint64_t i = 0; i < values.size(); ++i) {
        std::vector<float> wanted(values[i].size());
        add_in_rank_order(wanted, rank.size(), 0, salt + i, false);
        require_same(values[i].data(), wanted.data(), wanted.size(), fmt::format("call {}", i));
      }
    };
    check(large, 0);
    check(small, 1000);
    rank.meet();
  }));
}

// One rank's transport, connected to that of the other rank. Rank 0 sends, rank 1 receives.
struct ConnectedRank {
  explicit ConnectedRank(Rank &rank)
      : rank(rank),
        seat(create_lone_seat(rank.rank(), 2, rank.waiter, rank.failure)),
        net(rank.rank(), "127.0.0.1", {}) {
    net.join(test_job(rank.team->all_gather(net.address(), "addresses")), seat);
    auto lock = net.lock();
    net.add(messages_key, ear);
    net.greet(1 - rank.rank());
    require(net.changed().wait_for(lock, 20s, [&] { return net.connected(1 - rank.rank()); }), "no connection");
  }
  ~ConnectedRank() {
    const auto lock = net.lock();
    net.remove(messages_key);
  }
  void send(uint64_t number, messages::Kind kind = messages::Kind::call, uint64_t key = messages_key) {
    messages::Header word{};
    word.magic = messages::header_magic;
    word.kind = kind;
    word.from = rank.rank();
    word.key = key;
    word.number = number;
    const auto lock = net.lock();
    net.send_control(1, word, nullptr, 0);
    net.wake();
  }
  bool has_received(uint64_t number) {
    const auto lock = net.lock();
    return ear.heard >= number;
  }
  void await(uint64_t number) {
    for (const auto end = Clock::now() + 20s; !has_received(number); std::this_thread::yield())
      require(Clock::now() < end, "the background thread does not hear");
  }

  Rank &rank;
  std::shared_ptr<Seat> seat;
  tcp::TcpTransport net;
  Ear ear;
};

// The thread of a short call receives the first message, the background thread the second: once its timer has ended,
// and not when it looks once a second.
TEST(NetShortCalls, LeaveTheConnectionsToTheBackgroundThreadAgain) {
  if (over_ucx()) GTEST_SKIP() << "of TCP";
  expect_well(run_threads(2, [](Rank &rank) {
    ConnectedRank one(rank);
    auto best = Clock::duration::max();
    for (uint64_t turn = 1; turn <= 20; ++turn) {
      rank.meet();
      if (rank.rank() == 1) {
        messages::CallUnderWay call(one.net, true);
        while (!call.try_to_drive()) std::this_thread::yield();
        messages::CallUnderWay second(one.net, true);
        require(!second.try_to_drive(), "two threads drive");
        rank.meet();
        while (!one.has_received(2 * turn)) call.drive({}, 5);
      } else {
        rank.meet();
        one.send(2 * turn);
      }
      rank.meet();
      const auto start = Clock::now();
      rank.rank() == 0 ? one.send(2 * turn + 1) : one.await(2 * turn + 1);
      best = std::min(best, Clock::now() - start);
    }
    require(best < 500ms, "the background thread does not look at connections again");
    rank.meet();
  }));
}

// A call of another thread is under way when a short call ends, so its messages do not wait for the timer of 2 ms. The
// best turn counts, because the machine may be loaded.
TEST(NetShortCalls, DoNotDelayTheMessagesOfOtherCalls) {
  if (over_ucx()) GTEST_SKIP() << "of TCP";
  static std::atomic<Clock::rep> said{0};
  expect_well(run_threads(2, [](Rank &rank) {
    ConnectedRank one(rank);
    auto best = Clock::duration::max();
    for (uint64_t turn = 1; turn <= 50; ++turn) {
      messages::CallUnderWay other(one.net, false);
      if (rank.rank() == 1) {
        messages::CallUnderWay call(one.net, true);
        while (!call.try_to_drive()) std::this_thread::yield();
      }
      rank.meet();
      if (rank.rank() == 0) {
        said = Clock::now().time_since_epoch().count();
        one.send(turn);
      } else {
        one.await(turn);
        best = std::min(best, Clock::now().time_since_epoch() - Clock::duration(said.load()));
      }
      rank.meet();
    }
    const auto us = best / 1us;
    require(rank.rank() == 0 || best < 1500us, fmt::format("no message comes in less than {} us", us));
  }));
}

// A thread that drives reads only from the peers of its call, and every 10 ms from all peers.
TEST(NetShortCalls, ReadFromPeersTheyDoNotWaitFor) {
  if (over_ucx()) GTEST_SKIP() << "of TCP";
  expect_well(run_threads(2, [](Rank &rank) {
    ConnectedRank one(rank);
    std::optional<messages::CallUnderWay> call;
    if (rank.rank() == 1) {
      call.emplace(one.net, true);
      while (!call->try_to_drive()) std::this_thread::yield();
    }
    rank.meet();
    if (rank.rank() == 0) one.send(1);
    for (const auto end = Clock::now() + 20s; rank.rank() == 1 && !one.has_received(1); call->drive({}, 0))
      require(Clock::now() < end, "the thread reads only from the peers of its call");
    rank.meet();
  }));
}

// The last read of a short call takes a question to a channel that does not exist. When the call ends, the background
// thread answers the question at once. It does not wait until it looks once a second.
TEST(NetShortCalls, LeaveNoQuestionUnanswered) {
  if (over_ucx()) GTEST_SKIP() << "of TCP";
  static constexpr uint64_t nowhere = messages_key + 1;
  expect_well(run_threads(2, [](Rank &rank) {
    Ear answers;
    ConnectedRank one(rank);
    if (const auto lock = one.net.lock(); rank.rank() == 0) one.net.add(nowhere, answers);
    const auto answered = [&] {
      const auto lock = one.net.lock();
      return answers.heard;
    };
    int late = 0;
    for (uint64_t turn = 1; turn <= 10; ++turn) {
      std::optional<messages::CallUnderWay> call;
      if (rank.rank() == 1) {
        call.emplace(one.net, true);
        while (!call->try_to_drive()) std::this_thread::yield();
      }
      rank.meet();
      if (rank.rank() == 0) {
        one.send(turn, messages::Kind::ask, nowhere);
        one.send(turn);
      }
      std::this_thread::sleep_for(5ms);  // by then both messages have arrived, so one read takes both
      rank.meet();
      if (rank.rank() == 1) {
        while (!one.has_received(turn)) call->drive({}, 5);
        call.reset();
      }
      const auto start = Clock::now();
      for (; rank.rank() == 0 && answered() < turn; std::this_thread::yield())
        require(Clock::now() - start < 20s, "a question is not answered");
      late += Clock::now() - start >= 500ms;
      rank.meet();
    }
    require(late <= 5, fmt::format("{} of 10 questions are answered only by the look once a second", late));
    if (const auto lock = one.net.lock(); rank.rank() == 0) one.net.remove(nowhere);
    rank.meet();
  }));
}

}  // namespace
}  // namespace fsdp::transport::test
