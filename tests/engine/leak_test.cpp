// SPDX-License-Identifier: Apache-2.0
// A context and its models give back everything that they took, after a good end and after every kind of failure. After
// the last round, descriptors, threads, mappings and memory are at the level of the second round.
#include <dirent.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <barrier>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "../library_threads.h"
#include "harness.h"

using namespace harness;

namespace {

size_t count_entries(const char *path) {
  size_t count = 0;
  DIR *directory = ::opendir(path);
  while (::readdir(directory)) ++count;
  ::closedir(directory);
  return count;
}

size_t count_lines(const char *path) {
  std::ifstream file(path);
  size_t count = 0;
  for (std::string line; std::getline(file, line);) ++count;
  return count;
}

uint64_t status_kib(const std::string &key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key)) return std::stoull(line.substr(key.size()));
  return 0;
}

// The bytes in use in all heaps. Free memory of heaps, and stacks of ended threads, are not counted, because they
// depend on which threads ran at the same time.
uint64_t allocated_bytes() {
  const auto info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
}

struct Level {
  size_t files = count_entries("/proc/self/fd"), threads = fsdp::test::library_threads();
  size_t mappings = count_lines("/proc/self/maps");
  uint64_t resident_kib = status_kib("VmRSS:"), shared_kib = status_kib("RssShmem:");
  uint64_t heap_bytes = allocated_bytes();
};

Level settled_level(size_t threads_that_stay) {
  fsdp::test::await_library_threads(threads_that_stay);
  return {};
}

// Ten have every way in which a round differs from others. Under a sanitizer no memory is compared that needs more.
const int rounds = is_sanitized() ? 10 : 20;
constexpr uint64_t heap_noise = 64 * 1024;  // a context remembers some hundred bytes of each model: its flight record
// Far less than eighteen rounds' memory of any role: leak_scenario.
constexpr uint64_t stacks_kib = 12 * 1024;

// A leak of one page, mapping or descriptor a round is found: over eighteen rounds it exceeds the allowed noise.
void expect_level(const std::function<void(int)> &round) {
  const size_t standing = fsdp::test::library_threads();  // of contexts that outlive the rounds
  Level second;
  for (int i = 0; i < rounds; ++i) {
    round(i);
    ::malloc_trim(0);
    if (i == 1) second = settled_level(standing);
  }
  const Level last = settled_level(standing);
  EXPECT_EQ(last.files, second.files);
  EXPECT_EQ(last.threads, second.threads);
  EXPECT_LE(last.shared_kib, second.shared_kib + 64);
  if (!is_sanitized()) {  // which keeps freed memory back and looks for leaks itself
    EXPECT_LT(last.mappings, second.mappings + 9);
    EXPECT_LT(last.heap_bytes, second.heap_bytes + heap_noise);
    EXPECT_LT(last.resident_kib, second.resident_kib + stacks_kib);
  }
  printf(
      "descriptors %zu -> %zu, threads %zu -> %zu, mappings %zu -> %zu, heap %lu -> %lu bytes, resident %lu -> %lu "
      "KiB, "
      "shared %lu -> %lu KiB\n",
      second.files, last.files, second.threads, last.threads, second.mappings, last.mappings, second.heap_bytes,
      last.heap_bytes, second.resident_kib, last.resident_kib, second.shared_kib, last.shared_kib);
}

// Two MiB of weights, so that no role's memory hides in the noise.
Scenario leak_scenario(fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.steps = 1;
  scenario.context.timeout_ms = 20'000;
  scenario.model.unshard_mode = mode;
  scenario.groups = equal_groups(4, 256, 512);
  return scenario;
}

// Stacks and heaps of the test's own threads are few and stay.
class Leak : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    ::mallopt(M_ARENA_MAX, 2);
    train_threads(leak_scenario());  // what the process needs once: lazily bound functions, locales, heaps
  }
  void SetUp() override { fsdp::test::await_library_threads(0); }
};

TEST_F(Leak, NothingIsLeftAfterTraining) {
  expect_level([](int i) { train_threads(leak_scenario(i % 2 ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED)); });
}

TEST_F(Leak, NothingIsLeftAfterTrainingInEveryStrategy) {
  expect_level([](int i) {
    Scenario scenario = leak_scenario();
    scenario.model.strategy = 1 + i % 4;
    train_threads(scenario);
  });
}

TEST_F(Leak, NothingIsLeftAfterManyModelsOfOneContext) {
  const Scenario scenario = leak_scenario();
  std::vector<fsdp_context *> contexts(2);
  ASSERT_EQ(fsdp_create_local_contexts(2, &scenario.context, contexts.data()), FSDP_OK);
  std::atomic<int> failures{0};
  expect_level([&](int) {
    const auto body = [&](uint32_t r) {
      try {
        Rank rank(contexts[r], scenario);
        Outcome outcome;
        train(rank, outcome);
      } catch (const std::exception &) {
        ++failures;
      }
    };
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  });
  EXPECT_EQ(failures, 0);
  for (fsdp_context *context : contexts) fsdp_destroy_context(context);
}

TEST_F(Leak, NothingIsLeftAfterAnAbortInTheMiddle) {
  std::atomic<int> ended{0};
  expect_level([&](int i) {
    const Scenario scenario = leak_scenario();
    std::vector<std::string> errors;
    run_threads(
        scenario,
        [&](uint32_t r, fsdp_context *context) {
          Rank rank(context, scenario);
          rank.load();
          if (r == static_cast<uint32_t>(i % 2)) {
            forward(rank, nullptr);
            if (i % 3) backward_group(rank, 3, 0, 0, nullptr);
            FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
            fsdp_abort_context(context, "enough");
            REQUIRE(fsdp_finish_grads(rank.model, 1.0, 0, nullptr) == FSDP_ABORTED);
            ++ended;
            return;
          }
          try {
            forward(rank, nullptr);
            backward(rank, 0, 0, nullptr);
            FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
          } catch (const Failure &failure) {
            ended += failure.status == FSDP_PEER_FAILED;
          }
        },
        &errors);
  });
  EXPECT_EQ(ended, 2 * rounds);
}

TEST_F(Leak, NothingIsLeftAfterASealThatDisagrees) {
  std::atomic<int> disagreed{0};
  const Scenario scenario = leak_scenario();
  expect_level([&](int) {
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Scenario mine = scenario;
      if (r) mine.groups[2].params[0].shape[0] = 255;
      Rank rank(context, mine, false);
      disagreed += fsdp_seal_model(rank.model) == FSDP_MISMATCH;
    });
  });
  EXPECT_EQ(disagreed, 2 * rounds);
}

// Every allocation of a seal fails once; all ranks are told, give back what they had, and the context goes on.
TEST_F(Leak, NothingIsLeftAfterAnAllocationThatFails) {
  std::atomic<int> refused{0}, sealed{0};
  expect_level([&](int i) {
    Scenario scenario = leak_scenario(i % 2 ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED);
    scenario.context.debug_failed_allocation = 1 + static_cast<uint64_t>(i) % 5;
    for (GroupDef &group : scenario.groups) group.params[0].dtype = FSDP_BFLOAT16;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario, false);
      const fsdp_status status = fsdp_seal_model(rank.model);
      if (status == FSDP_OUT_OF_MEMORY)
        ++refused;
      else
        FSDP(status);
      Rank again(context, scenario, false);
      const fsdp_status second = fsdp_seal_model(again.model);
      if (second != FSDP_OUT_OF_MEMORY) FSDP(second);
      if (second == FSDP_OK) {
        again.load();
        forward(again, nullptr);
        ++sealed;
      }
      FSDP(fsdp_close_context(context));
    });
  });
  printf("%d seals refused, %d sealed again\n", refused.load(), sealed.load());
  EXPECT_EQ(refused, 2 * rounds);
  EXPECT_EQ(sealed, 2 * rounds);
}

TEST_F(Leak, NothingIsLeftAfterADestroyWithWorkInFlight) {
  expect_level([&](int i) {
    const Scenario scenario = leak_scenario(i % 2 ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED);
    std::vector<fsdp_context *> contexts(2);
    FSDP(fsdp_create_local_contexts(2, &scenario.context, contexts.data()));
    std::barrier together(2);
    const auto body = [&](uint32_t r) {
      Rank rank(contexts[r], scenario);
      rank.load();
      forward(rank, nullptr);
      if (r == 0)
        for (const size_t g : {3, 2}) backward_group(rank, g, 0, 0, nullptr);
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, 0, nullptr));
      together.arrive_and_wait();
      if (i % 3 == 0) fsdp_destroy_context(contexts[r]);
      fsdp_destroy_model(rank.model);
      rank.model = nullptr;
      if (i % 3) fsdp_destroy_context(contexts[r]);
    };
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  });
}

TEST_F(Leak, NothingIsLeftAfterPlanning) {
  expect_level([&](int i) {
    const Scenario scenario = leak_scenario();
    fsdp_context *context = nullptr;
    FSDP(fsdp_create_plan_context(64, static_cast<uint32_t>(i), &scenario.context, &context));
    { Rank rank(context, scenario); }
    fsdp_destroy_context(context);
  });
}

}  // namespace
