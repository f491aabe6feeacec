// SPDX-License-Identifier: Apache-2.0
// Tests the table of handles: which values are valid, how slots are reused, and how an object's use ends.
#include "abi/handle_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

using fsdp::abi::HandleKind;
using fsdp::abi::HandleTable;

namespace {

std::shared_ptr<void> object() { return std::make_shared<int>(1); }

TEST(HandleTable, FindsWhatWasAdded) {
  HandleTable table;
  const auto mine = object();
  const uint64_t handle = table.add(HandleKind::group, mine, 77);
  const auto found = table.find(handle, HandleKind::group);
  EXPECT_EQ(found.object, mine);
  EXPECT_EQ(found.number, 77U);
  EXPECT_EQ(table.kind_of(handle), HandleKind::group);
  EXPECT_FALSE(table.destroyed(handle));
  for (const HandleKind other :
       {HandleKind::none, HandleKind::context, HandleKind::mesh, HandleKind::model, HandleKind::capture}) {
    EXPECT_FALSE(table.find(handle, other).object);
    EXPECT_FALSE(table.remove(handle, other));
  }
  EXPECT_EQ(table.find(handle, HandleKind::group).object, mine);
}

// A handle never equals an address that memory for objects can have.
TEST(HandleTable, HandlesAreOdd) {
  HandleTable table;
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(table.add(HandleKind::model, object()) % 2, 1U);
}

TEST(HandleTable, EveryBitCounts) {
  HandleTable table;
  std::set<uint64_t> alive;
  for (int i = 0; i < 200; ++i) alive.insert(table.add(HandleKind::model, object()));
  for (const uint64_t handle : alive)
    for (int bit = 0; bit < 64; ++bit) {
      const uint64_t other = handle ^ uint64_t { 1 } << bit;
      if (alive.contains(other)) continue;
      EXPECT_EQ(table.kind_of(other), HandleKind::none);
      for (const HandleKind kind : {HandleKind::context, HandleKind::model, HandleKind::capture})
        EXPECT_FALSE(table.find(other, kind).object) << handle << " bit " << bit;
    }
}

TEST(HandleTable, OneSlotServesAllThatComeOneAfterTheOther) {
  HandleTable table;
  std::set<uint64_t> seen;
  for (int i = 0; i < 10'000; ++i) {
    auto mine = object();
    const std::weak_ptr<void> watch = mine;
    const uint64_t handle = table.add(HandleKind::mesh, std::move(mine));
    EXPECT_TRUE(seen.insert(handle).second);
    EXPECT_TRUE(table.remove(handle, HandleKind::mesh));
    EXPECT_TRUE(watch.expired());
    EXPECT_FALSE(table.remove(handle, HandleKind::mesh));
  }
  EXPECT_EQ(table.slot_count(), 1U);
  for (const uint64_t handle : seen) {
    EXPECT_FALSE(table.find(handle, HandleKind::mesh).object);
    EXPECT_TRUE(table.destroyed(handle));
  }
}

TEST(HandleTable, ASlotWithoutFurtherGenerationsIsRetired) {
  HandleTable table(3);
  std::set<uint64_t> seen;
  for (int i = 0; i < 12; ++i) {
    const uint64_t handle = table.add(HandleKind::mesh, object());
    EXPECT_TRUE(seen.insert(handle).second) << i;
    table.remove(handle, HandleKind::mesh);
  }
  EXPECT_EQ(table.slot_count(), 4U);
  for (const uint64_t handle : seen)
    EXPECT_TRUE(table.destroyed(handle) && !table.find(handle, HandleKind::mesh).object);
}

TEST(HandleTable, WhatIsForgottenIsKeptAndRefused) {
  HandleTable table;
  auto mine = object();
  const std::weak_ptr<void> watch = mine;
  const uint64_t handle = table.add(HandleKind::context, std::move(mine));
  table.forget(handle, HandleKind::context);
  EXPECT_FALSE(watch.expired());
  EXPECT_FALSE(table.find(handle, HandleKind::context).object);
  EXPECT_FALSE(table.remove(handle, HandleKind::context));
  EXPECT_TRUE(table.destroyed(handle));
  table.add(HandleKind::context, object());
  EXPECT_EQ(table.slot_count(), 2U);
}

// Many handles exist at once, more than the first chunks hold. Some are removed, others are added.
TEST(HandleTable, ManyHandlesAliveAtOnceAreFound) {
  HandleTable table;
  std::vector<uint64_t> handles;
  for (uint32_t i = 0; i < 50'000; ++i) handles.push_back(table.add(HandleKind::group, object(), i));
  for (size_t i = 0; i < handles.size(); i += 3) table.remove(handles[i], HandleKind::group);
  for (uint32_t i = 0; i < 10'000; ++i) table.add(HandleKind::model, object());
  EXPECT_EQ(table.slot_count(), 50'000U);
  for (uint32_t i = 0; i < handles.size(); ++i) {
    const auto found = table.find(handles[i], HandleKind::group);
    ASSERT_EQ(found.object == nullptr, i % 3 == 0) << i;
    ASSERT_TRUE(!found.object || found.number == i) << i;
  }
}

// A call keeps the object that it uses, although other threads may destroy the handle meanwhile. The last call to end
// destroys the object.
TEST(HandleTable, WhatIsPinnedLivesAsLongAsThePins) {
  HandleTable table;
  auto mine = object();
  const std::weak_ptr<void> watch = mine;
  const void *const address = mine.get();
  const uint64_t handle = table.add(HandleKind::group, std::move(mine), 7);
  {
    HandleTable::Pin first = table.pin(handle, HandleKind::group);
    EXPECT_EQ(first.object(), address);
    EXPECT_EQ(first.number(), 7u);
    HandleTable::Pin second;
    EXPECT_FALSE(second.object());
    second = table.pin(handle, HandleKind::group);
    EXPECT_FALSE(table.pin(handle, HandleKind::model).object());
    EXPECT_TRUE(table.remove(handle, HandleKind::group));  // returns, though there are pins
    EXPECT_FALSE(table.pin(handle, HandleKind::group).object());
    EXPECT_FALSE(table.remove(handle, HandleKind::group));
    table.add(HandleKind::group, object());
    EXPECT_EQ(table.slot_count(), 2u);  // the slot is not free yet
    first = HandleTable::Pin();
    EXPECT_FALSE(watch.expired());
    EXPECT_EQ(second.object(), address);
  }
  EXPECT_TRUE(watch.expired());
  table.add(HandleKind::group, object());
  EXPECT_EQ(table.slot_count(), 2u);  // the slot is free again
}

// A thread that finds a handle gets its object and no other. Exactly one remove gets the object.
TEST(HandleTable, OnManyThreads) {
  HandleTable table;
  constexpr uint32_t rounds = 4000, enough = 200;
  std::atomic<uint64_t> shown{0};
  std::atomic<uint32_t> removed{0}, wrong{0}, found_alive{0};
  std::atomic<bool> end{false};
  std::vector<std::thread> readers;
  for (int t = 0; t < 2; ++t)
    readers.emplace_back([&] {
      while (!end) {
        const uint64_t handle = shown;
        if (const auto found = table.find(handle, HandleKind::model); found.object) {
          wrong += *std::static_pointer_cast<uint32_t>(found.object) != found.number;
          ++found_alive;
        }
        if (const auto pinned = table.pin(handle, HandleKind::model); pinned.object()) {
          wrong += *static_cast<uint32_t *>(pinned.object()) != pinned.number();
          if (pinned.number() % 3 == 0 && table.remove(handle, HandleKind::model)) ++removed;
          wrong += *static_cast<uint32_t *>(pinned.object()) != pinned.number();
        }
        if (table.remove(handle, HandleKind::model)) ++removed;
      }
    });
  // However slow the machine is, the readers get time to find handles, and to remove objects before the writer does.
  uint32_t own = 0, made = 0;
  const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (made < rounds || ((found_alive < enough || removed < enough) && std::chrono::steady_clock::now() < last)) {
    const uint32_t i = made++;
    const uint64_t handle = table.add(HandleKind::model, std::make_shared<uint32_t>(i), i);
    shown = handle;
    if (i % 64 == 0) std::this_thread::yield();
    own += table.remove(handle, HandleKind::model) != nullptr;
  }
  end = true;
  for (std::thread &thread : readers) thread.join();
  EXPECT_EQ(own + removed, made);
  EXPECT_EQ(wrong, 0u);
  EXPECT_GE(found_alive, enough);
  EXPECT_GE(removed, enough);
}

}  // namespace
