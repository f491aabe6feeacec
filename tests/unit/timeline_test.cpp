// SPDX-License-Identifier: Apache-2.0
// Tests the ring with writers that lap each other. No event is torn or invented, and the numbers add up.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "trace/timeline.h"

using namespace fsdp::trace;

namespace {

TimelineEvent event_of(uint64_t number, TimelineLane lane) {
  return {"event", nullptr, number, number + 1, 2 * number, static_cast<uint32_t>(number), lane, EventKind::user};
}

bool whole(const TimelineEvent &event) {
  return event.end_ns == event.begin_ns + 1 && event.bytes == 2 * event.begin_ns && event.version == event.begin_ns;
}

TEST(Timeline, IsEmptyAtFirst) {
  const Timeline timeline(4);
  EXPECT_TRUE(timeline.read().events.empty());
  EXPECT_EQ(timeline.read().lost, 0u);
}

TEST(Timeline, KeepsTheNewest) {
  Timeline timeline(4);
  for (uint64_t i = 1; i <= 10; ++i) timeline.record(event_of(i, 0));
  const auto snapshot = timeline.read();
  ASSERT_EQ(snapshot.events.size(), 4u);
  EXPECT_EQ(snapshot.events.front().begin_ns, 7u);
  EXPECT_EQ(snapshot.events.back().begin_ns, 10u);
  EXPECT_EQ(snapshot.lost, 6u);
}

TEST(Timeline, OrdersByLaneThenBeginThenTheLongerFirst) {
  Timeline timeline(8);
  timeline.record({"inner", nullptr, 5, 6, 0, 0, 1, EventKind::wait});
  timeline.record({"outer", nullptr, 5, 9, 0, 0, 1, EventKind::call});
  timeline.record({"late", nullptr, 7, 8, 0, 0, 0, EventKind::call});
  const auto events = timeline.read().events;
  EXPECT_STREQ(events[0].name, "late");
  EXPECT_STREQ(events[1].name, "outer");
  EXPECT_STREQ(events[2].name, "inner");
}

TEST(Timeline, TextsAreKeptOnce) {
  Timeline timeline(4);
  std::string text = "a group with a name too long to be stored in place";
  const char *kept = timeline.keep(text);
  EXPECT_EQ(timeline.keep(text), kept);
  text[0] = 'A';
  EXPECT_NE(timeline.keep(text), kept);
  EXPECT_EQ(kept[0], 'a');
}

TEST(Timeline, NumbersOfModelsAreUsedAgain) {
  Timeline timeline(4);
  EXPECT_EQ(timeline.open_model(), 0u);
  EXPECT_EQ(timeline.open_model(), 1u);
  timeline.close_model(0);
  EXPECT_EQ(timeline.open_model(), 0u);
  EXPECT_EQ(timeline.open_model(), 2u);
}

// The writers go on until the reader has seen enough, so that it reads while they write however slow the machine is.
TEST(Timeline, WritersThatLapEachOtherTearNothing) {
  constexpr TimelineLane writers = 3;
  constexpr uint64_t enough = 2'000'000;
  Timeline timeline(64);
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> recorded = 0;
  std::vector<std::thread> threads;
  for (TimelineLane lane = 0; lane < writers; ++lane)
    threads.emplace_back([&, lane] {
      uint64_t i = 0;
      while (!stop) timeline.record(event_of(++i * writers + lane, lane));
      recorded += i;
    });
  uint64_t torn = 0, seen = 0;
  while (seen < enough)
    for (const TimelineEvent &event : timeline.read().events) {
      torn += !whole(event) || event.begin_ns % writers != event.lane;
      ++seen;
    }
  stop = true;
  for (auto &thread : threads) thread.join();
  const auto snapshot = timeline.read();
  for (const TimelineEvent &event : snapshot.events) torn += !whole(event);
  EXPECT_EQ(torn, 0u);
  EXPECT_EQ(snapshot.lost + snapshot.events.size(), recorded);
}

}  // namespace
