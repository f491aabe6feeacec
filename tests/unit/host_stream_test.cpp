// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <thread>
#include <vector>

#include "device/host/stream.h"
#include "host_stream_fixture.h"

namespace fsdp::test {
namespace {

using device::Options;

// Streams behave the same with a worker and inline, with and without delays.
class HostStream : public testing::TestWithParam<Options> {
 protected:
  Host host_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Modes, HostStream,
                         testing::Values(Options{}, Options{.overlap = false},
                                         Options{.delay_us = 200, .delay_seed = 7},
                                         Options{.overlap = false, .delay_us = 50}));

TEST_P(HostStream, RunsInOrder) {
  auto stream = host_.stream("order");
  std::vector<int> seen;
  seen.reserve(100);
  for (int i = 0; i < 100; ++i) stream->run([&seen, i] { seen.push_back(i); });
  host_.finish(*stream);
  ASSERT_EQ(seen.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(seen[static_cast<size_t>(i)], i);
}

TEST_P(HostStream, KernelsInStreamOrder) {
  auto stream = host_.stream("kernels");
  std::vector<float> a(1000, 2.0f), b(1000), grad(1000, 1.0f), m(1000), v(1000);
  std::vector<uint16_t> narrow(1000);
  double squares = 0;
  uint64_t nonfinite = 0;
  stream->fill(b.data(), 0, 4000);
  stream->copy(b.data(), a.data(), 4000);
  stream->add(b.data(), FSDP_FLOAT32, a.data(), FSDP_FLOAT32, 1000);
  stream->scale(b.data(), 0.5f, 1000);
  stream->cast(narrow.data(), FSDP_BFLOAT16, b.data(), FSDP_FLOAT32, 1000);
  stream->rank_sum({reinterpret_cast<const std::byte *>(narrow.data()), 1000, 2, FSDP_BFLOAT16, FSDP_BFLOAT16, b.data(),
                    500, 1.0f, false});
  stream->sum_squares(&squares, b.data(), 1000, 10);
  stream->count_nonfinite(&nonfinite, b.data(), 1000);
  const device::AdamWSpan span{a.data(), grad.data(), m.data(), v.data(), nullptr, 0, 1000};
  stream->adamw({0.1f, device::average_of(0.9), device::average_of(0.999), 1e-8f, 0, 0.1f, 0.001f, 1, 0}, {&span, 1});
  // The steps are repeated on weights of 2 in bf16: once with the step in the call, once with the step in memory.
  std::vector<uint16_t> rounded[2] = {std::vector<uint16_t>(1000, 0x4000), std::vector<uint16_t>(1000, 0x4000)};
  std::vector<float> moments[4];
  device::CompactSpan compact[2] = {};
  for (size_t i = 0; i < 2; ++i) {
    moments[i].resize(1000), moments[i + 2].resize(1000);
    compact[i].weight = rounded[i].data(), compact[i].grad = grad.data(), compact[i].exp_avg = moments[i].data();
    compact[i].exp_avg_sq = moments[i + 2].data(), compact[i].form = device::MainForm::rounded;
    compact[i].numbers = {0, 1000, 0}, compact[i].count = 1000;
  }
  const device::AdamW step{0.1f, device::average_of(0.9), device::average_of(0.999), 1e-8f, 0, 0.1f, 0.001f, 1, 9};
  device::AdamW in_memory{};
  stream->compact_adamw(step, {compact, 1});
  stream->store_step(&in_memory, step);
  stream->compact_adamw_from(&in_memory, {compact + 1, 1});
  std::vector<float> third(1000, 1.0f / 3);
  std::vector<uint16_t> of_third(1000);
  stream->round_randomly({third.data(), of_third.data(), 1000, {9, 0, 1}, {0, 1000, 0}});
  host_.finish(*stream);
  EXPECT_EQ(rounded[0], rounded[1]);
  for (const uint16_t weight : rounded[0]) EXPECT_TRUE(weight == 0x3ff3 || weight == 0x3ff4) << weight;
  for (const uint16_t number : of_third) EXPECT_TRUE(number == 0x3eaa || number == 0x3eab) << number;
  EXPECT_NE(std::count(of_third.begin(), of_third.end(), 0x3eaa), 0);
  EXPECT_NE(std::count(of_third.begin(), of_third.end(), 0x3eab), 0);
  EXPECT_EQ(narrow[0], 0x4000);
  EXPECT_EQ(b[499], 4.0f);
  EXPECT_EQ(b[500], 2.0f);
  EXPECT_EQ(squares, 500 * 16.0 + 500 * 4.0);
  EXPECT_EQ(nonfinite, 0u);
  EXPECT_NEAR(a[999], 1.9f, 1e-5);
}

TEST_P(HostStream, EventsAcrossStreams) {
  auto first = host_.stream("first"), second = host_.stream("second");
  auto event = host_.device->create_event();
  EXPECT_TRUE(event->done());  // never recorded
  int value = 0;
  for (int round = 0; round < 50; ++round) {
    first->run([&value, round] { value = round; });
    first->record(*event);
    second->wait(*event);
    second->run([&value, round] { value = value == round ? round + 1000 : -1; });
    second->record(*event);
    first->wait(*event);
  }
  host_.device->synchronize(*event);
  EXPECT_EQ(value, 1049);
}

TEST_P(HostStream, CallerStreamWaitsForALibraryStream) {
  auto stream = host_.stream("slow");
  auto event = host_.device->create_event();
  int value = 0;
  stream->run([&value] {
    std::this_thread::sleep_for(5ms);
    value = 1;
  });
  stream->record(*event);
  auto &caller = host_.device->caller_stream(nullptr);
  caller.wait(*event);
  EXPECT_EQ(value, 1);
  EXPECT_TRUE(event->done());
  caller.run([&value] { value = 2; });
  EXPECT_EQ(value, 2);
  caller.record(*event);
  EXPECT_TRUE(event->done());
  stream->wait(*event);
  host_.finish(*stream);
}

TEST_P(HostStream, ManyMoreTasksAndEventsThanTheRingHolds) {
  if (GetParam().delay_us != 0) GTEST_SKIP() << "would only sleep";
  auto first = host_.stream("first"), second = host_.stream("second");
  auto event = host_.device->create_event();
  uint64_t sum = 0, expected = 0;
  for (uint64_t i = 0; i < 10 * device::WorkerStream::capacity; ++i) {
    auto &stream = i % 2 ? *first : *second;
    auto &other = i % 2 ? *second : *first;
    stream.run([&sum, i] { sum = sum * 3 + i; });
    stream.record(*event);
    other.wait(*event);
    expected = expected * 3 + i;
  }
  host_.finish(*first);
  host_.finish(*second);
  EXPECT_EQ(sum, expected);
}

TEST_P(HostStream, DestructorFinishesPendingWork) {
  int done = 0;
  {
    auto stream = host_.stream("pending");
    for (int i = 0; i < 20; ++i) stream->run([&done] { ++done; });
  }
  EXPECT_EQ(done, 20);
}

TEST(HostWorker, WaitKeepsTheCountOfItsTime) {
  Host host;
  auto source = host.stream("source"), sink = host.stream("sink");
  auto event = host.device->create_event();
  Gate early, late;
  std::atomic<bool> reached{false};
  source->run([&] { early.hold(host.failure); });
  source->record(*event);
  sink->wait(*event);
  sink->run([&] { reached = true; });
  source->run([&] { late.hold(host.failure); });
  source->record(*event);  // moves the event, but not the wait above
  early.open = true;
  host.finish(*sink);
  EXPECT_TRUE(reached);
  EXPECT_FALSE(event->done());
  late.open = true;
  host.finish(*source);
  EXPECT_TRUE(event->done());
}

TEST(HostWorker, FullRingMakesTheProducerWait) {
  Host host;
  auto stream = host.stream("full");
  Gate gate;
  std::atomic<bool> filled{false};
  bool waits = false;
  std::thread opener([&, producer = ::gettid()] {
    waits = fsdp::test::await_asleep(producer, filled);
    gate.open = true;
  });
  stream->run([&] { gate.hold(host.failure); });
  for (uint64_t i = 0; i < device::WorkerStream::capacity; ++i) stream->run([] {});
  filled = true;
  opener.join();
  EXPECT_TRUE(waits);
  host.finish(*stream);
}

TEST(HostWorker, ThreadsAreNamedBlockSignalsAndEnd) {
  ASSERT_EQ(fsdp::test::await_library_threads(0), 0u);  // left by earlier tests
  Host host;
  {
    auto stream = host.stream("gather-with-a-long-name");
    EXPECT_EQ(fsdp::test::library_threads(), 1u);
    char name[16] = {};
    sigset_t blocked;
    stream->run([&] {
      pthread_getname_np(pthread_self(), name, sizeof name);
      pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    });
    host.finish(*stream);
    EXPECT_STREQ(name, "fsdp-gather-wit");
    for (const int signal : {SIGINT, SIGTERM, SIGALRM, SIGUSR1}) EXPECT_TRUE(sigismember(&blocked, signal));
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) EXPECT_FALSE(sigismember(&blocked, fault));
  }
  for (int i = 0; i < 20; ++i) {
    auto a = host.stream("a"), b = host.stream("b");
    a->run([] {});
  }
  EXPECT_EQ(fsdp::test::await_library_threads(0), 0u);
}

// Returns the policy of a stream's thread. The thread that creates the stream has the policy `of_caller`.
int policy_of_stream(bool gives_way, int of_caller) {
  int policy = -1;
  std::thread([&] {
    const sched_param none{};
    EXPECT_EQ(sched_setscheduler(0, of_caller, &none), 0);
    Host host;
    if (gives_way) host.device->give_way();
    auto stream = host.stream("polite");
    stream->run([&] { policy = sched_getscheduler(0); });
    host.finish(*stream);
  }).join();
  return policy;
}

TEST(HostWorker, GivesWayOnlyIfToldSoAndTheProgramChoseNoPolicy) {
  EXPECT_EQ(policy_of_stream(false, SCHED_OTHER), SCHED_OTHER);
  EXPECT_EQ(policy_of_stream(true, SCHED_OTHER), SCHED_BATCH);
  EXPECT_EQ(policy_of_stream(true, SCHED_IDLE), SCHED_IDLE);
}

// Holds the thread and the number of a task.
struct Ran {
  std::thread::id thread;
  int at = 0;  // position in the order of tasks
};

TEST(HostWorker, ABorrowedStreamWorksOnTheCallingThreadUntilItIsGivenBack) {
  Host host;
  auto stream = host.stream("borrowed"), other = host.stream("other");
  auto event = host.device->create_event();
  Ran before, here, after;
  int count = 0;
  const auto run = [&](Ran &ran) { stream->run([&] { ran = {std::this_thread::get_id(), ++count}; }); };
  run(before);
  host.finish(*stream);
  {
    const device::BorrowedStream borrowed(*stream);
    int value = 0;
    other->run([&value] {
      std::this_thread::sleep_for(5ms);
      value = 1;
    });
    other->record(*event);
    stream->wait(*event);
    EXPECT_EQ(value, 1);
    run(here);
    EXPECT_EQ(here.at, 2);
    stream->record(*event);
    EXPECT_TRUE(event->done());
  }
  run(after);
  host.finish(*stream);
  EXPECT_EQ(after.at, 3);
  EXPECT_EQ(here.thread, std::this_thread::get_id());
  EXPECT_NE(before.thread, here.thread);
  EXPECT_EQ(after.thread, before.thread);
}

TEST(HostWorker, AStreamWithWorkOrDelaysIsNotBorrowed) {
  for (const bool delayed : {false, true}) {
    Host host(Options{.delay_us = delayed ? 1U : 0U});
    auto stream = host.stream("busy");
    Gate gate;
    Ran ran;
    if (!delayed) stream->run([&] { gate.hold(host.failure); });
    const device::BorrowedStream borrowed(*stream);
    EXPECT_FALSE(borrowed);
    stream->run([&] { ran = {std::this_thread::get_id(), 1}; });
    gate.open = true;
    host.finish(*stream);
    EXPECT_EQ(ran.at, 1);
    EXPECT_NE(ran.thread, std::this_thread::get_id());
  }
}

TEST(HostDelay, DependsOnSeedAndNameOnly) {
  const auto times = [](uint64_t seed, const char *name) {
    device::Delay delay(Options{.delay_us = 300, .delay_seed = seed}, name);
    std::vector<uint64_t> result(1000);
    for (auto &us : result) us = delay.next_us();
    return result;
  };
  const auto a = times(5, "gather");
  EXPECT_EQ(a, times(5, "gather"));
  EXPECT_NE(a, times(6, "gather"));
  EXPECT_NE(a, times(5, "reduce"));
  EXPECT_EQ(*std::max_element(a.begin(), a.end()), 300u);
  EXPECT_EQ(*std::min_element(a.begin(), a.end()), 0u);
}

TEST(HostDelay, SlowsTheStreamDown) {
  Host host(Options{.delay_us = 1000, .delay_seed = 1});
  auto stream = host.stream("delayed");
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) stream->run([] {});
  host.finish(*stream);
  EXPECT_GT(std::chrono::steady_clock::now() - start, 2ms);  // expected: 10
}

TEST(HostWorker, WakesFromSleep) {
  Host host;
  auto stream = host.stream("idle");
  for (int i = 0; i < 20; ++i) {
    // With longer pauses the worker goes from spinning to sleeping.
    std::this_thread::sleep_for(std::chrono::microseconds(i * 100));
    int value = 0;
    stream->run([&value] { value = 1; });
    host.finish(*stream);
    EXPECT_EQ(value, 1);
  }
}

}  // namespace
}  // namespace fsdp::test
