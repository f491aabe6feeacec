// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "device/host/stream.h"
#include "host_stream_fixture.h"

namespace fsdp::test {
namespace {

using device::Options;

TEST(HostStreamFailure, SkipsWhatFollowsAndNothingHangs) {
  Host host;
  auto broken = host.stream("broken"), other = host.stream("other");
  auto event = host.device->create_event();
  std::atomic<int> ran{0};
  broken->run([] { fail_rank(FSDP_PEER_FAILED, 3, "rank 3 died"); });
  for (int i = 0; i < 1000; ++i) broken->run([&ran] { ++ran; });
  broken->record(*event);
  other->wait(*event);
  other->run([&ran] { ++ran; });
  EXPECT_EQ(status_of([&] { host.device->synchronize(*event); }), FSDP_PEER_FAILED);
  EXPECT_EQ(status_of([&] { host.finish(*other); }), FSDP_PEER_FAILED);
  // The wait ends with the failure; the stream still counts the work that it skips.
  for (int i = 0; i < 5000 && !event->done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(event->done());
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(host.failure.get()->rank, 3);
}

TEST(HostStreamFailure, OtherExceptionsAreBugs) {
  Host host;
  auto stream = host.stream("bug");
  stream->run([] { throw std::runtime_error("surprise"); });
  EXPECT_EQ(status_of([&] { host.finish(*stream); }), FSDP_INTERNAL);
  EXPECT_NE(host.failure.get()->message.find("surprise"), std::string::npos);
  Host second;
  auto memory = second.stream("memory");
  memory->run([] { throw std::bad_alloc(); });
  EXPECT_EQ(status_of([&] { second.finish(*memory); }), FSDP_OUT_OF_MEMORY);
}

TEST(HostStreamFailure, InlineStreamFailsTheContextAndThrows) {
  Host host(Options{.overlap = false});
  auto stream = host.stream("inline");
  EXPECT_EQ(status_of([&] { stream->run([] { fail(FSDP_MISMATCH, "ranks differ"); }); }), FSDP_MISMATCH);
  EXPECT_TRUE(host.failure.failed());
  bool ran = false;
  EXPECT_EQ(status_of([&] { stream->run([&ran] { ran = true; }); }), FSDP_MISMATCH);
  EXPECT_FALSE(ran);
}

TEST(HostStreamFailure, ABorrowedStreamFailsTheContextAndThrows) {
  Host host;
  auto stream = host.stream("borrowed");
  std::atomic<int> ran{0};
  {
    const device::BorrowedStream borrowed(*stream);
    EXPECT_EQ(status_of([&] { stream->run([] { fail(FSDP_MISMATCH, "ranks differ"); }); }), FSDP_MISMATCH);
    EXPECT_TRUE(host.failure.failed());
    EXPECT_EQ(status_of([&] { stream->run([&ran] { ++ran; }); }), FSDP_MISMATCH);
  }
  stream->run([&ran] { ++ran; });
  EXPECT_EQ(status_of([&] { host.finish(*stream); }), FSDP_MISMATCH);
  EXPECT_EQ(ran, 0);
}

TEST(HostStreamFailure, CallerStreamThrowsWithoutFailingTheContext) {
  Host host;
  auto &caller = host.device->caller_stream(nullptr);
  EXPECT_EQ(status_of([&] { caller.run([] { fail(FSDP_TIMEOUT, "too slow"); }); }), FSDP_TIMEOUT);
  EXPECT_FALSE(host.failure.failed());
}

TEST(HostStreamFailure, FailureFromOutsideEndsAWait) {
  Host host;
  Gate gate;
  auto stream = host.stream("waits");
  auto event = host.device->create_event();
  stream->run([&] { gate.hold(host.failure); });
  stream->record(*event);
  std::thread breaker([&] {
    std::this_thread::sleep_for(10ms);
    host.failure.set(Error(FSDP_ABORTED, "aborted"));
  });
  EXPECT_EQ(status_of([&] { host.device->caller_stream(nullptr).wait(*event); }), FSDP_ABORTED);
  breaker.join();
}

TEST(HostStreamFailure, WaitIsBoundedAndNamesTheStream) {
  Host host({}, 200);
  Gate gate;
  auto stream = host.stream("stuck");
  auto event = host.device->create_event();
  stream->run([&] { gate.hold(host.failure); });
  stream->record(*event);
  const auto start = std::chrono::steady_clock::now();
  try {
    host.device->synchronize(*event);
    ADD_FAILURE() << "no timeout";
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_TIMEOUT);
    EXPECT_NE(error.message.find("'stuck'"), std::string::npos) << error.message;
  }
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took, 200ms);
  EXPECT_LT(took, 5s);
  gate.open = true;
}

// A stream that waits for a stuck one times out too, and fails the context.
TEST(HostStreamFailure, WaitOfAStreamIsBounded) {
  Host host({}, 100);
  Gate gate;
  auto stuck = host.stream("stuck"), waiting = host.stream("waiting");
  auto event = host.device->create_event();
  stuck->run([&] { gate.hold(host.failure); });
  stuck->record(*event);
  waiting->wait(*event);
  while (!host.failure.failed()) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(host.failure.get()->status, FSDP_TIMEOUT);
}

TEST(HostStreamFailure, SlowProgressIsNoTimeout) {
  Host host({}, 2000);
  auto stream = host.stream("slow");
  for (int i = 0; i < 10; ++i) stream->run([] { std::this_thread::sleep_for(250ms); });
  EXPECT_EQ(status_of([&] { host.finish(*stream); }), FSDP_OK);
}

TEST(HostStreamFailure, InterruptedHookEndsAWaitOnTheCallersThread) {
  static std::atomic<int> polls;
  static std::thread::id caller;
  polls = 0;
  caller = std::this_thread::get_id();
  const auto hook = [](void *) -> int32_t {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    return ++polls == 3;
  };
  Host host({}, 60000, hook);
  auto stream = host.stream("busy"), other = host.stream("other");
  auto event = host.device->create_event();
  Gate gate;
  stream->run([&] { gate.hold(host.failure); });
  stream->record(*event);
  other->wait(*event);
  EXPECT_EQ(status_of([&] { host.device->synchronize(*event); }), FSDP_INTERRUPTED);
  EXPECT_EQ(polls, 3);
  EXPECT_FALSE(host.failure.failed());
  gate.open = true;
  host.finish(*other);
}

TEST(HostStreamFailure, InterruptedWhileTheRingIsFull) {
  static std::atomic<int> polls;
  polls = 0;
  Host host({}, 60000, [](void *) -> int32_t { return ++polls == 2; });
  auto stream = host.stream("full");
  Gate gate;
  std::atomic<uint64_t> ran{0};
  stream->run([&] { gate.hold(host.failure); });
  uint64_t enqueued = 0;
  EXPECT_EQ(status_of([&] {
              for (;; ++enqueued) stream->run([&ran] { ++ran; });
            }),
            FSDP_INTERRUPTED);
  EXPECT_EQ(enqueued, device::WorkerStream::capacity - 1);
  gate.open = true;
  stream.reset();
  EXPECT_EQ(ran, enqueued);
}

TEST(HostStreamFailure, DestructorSkipsOnceTheContextFailed) {
  Host host;
  std::atomic<int> ran{0};
  Gate gate;
  auto stream = host.stream("pending");
  stream->run([&] { gate.hold(host.failure); });
  for (int i = 0; i < 100; ++i) stream->run([&ran] { ++ran; });
  while (!gate.entered) std::this_thread::sleep_for(100us);
  host.failure.set(Error(FSDP_ABORTED, "aborted"));
  stream.reset();
  EXPECT_EQ(ran, 0);
}

}  // namespace
}  // namespace fsdp::test
