// SPDX-License-Identifier: Apache-2.0
// A rank is killed at any moment. Every other rank learns at once which rank it was, none hangs, nothing is left
// behind, and the survivors can form a new job.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <set>

#include "../slow_core.h"
#include "death.h"

using namespace harness;

namespace {

// The ranks that are left form a job of their own and train a step.
void recover(const World &world, uint32_t rank, uint32_t victim, Seen &seen, Report &report) {
  if (world.ranks() == 2) {
    report.recovered = 1;  // no other rank is left to form a job with; a world of one needs no bootstrap
    return;
  }
  const Scenario scenario = mortal_scenario(world.ranks() - 1, 20'000);
  fsdp_context *context = nullptr;
  try {
    live(scenario, rank > victim ? rank - 1 : rank, world.name() + "-again", seen, 1, context);
    report.recovered = 1;
  } catch (const Failure &failure) {
    std::strncpy(report.message, failure.what(), sizeof report.message - 1);
  }
  fsdp_destroy_context(context);
}

// Kills its own process a moment after it has reached the stage, so the time does not depend on the parent.
void doom(Seen &seen, uint32_t rank, Stage stage, uint32_t steps, uint64_t delay_us) {
  std::thread([=, &seen] {
    // A stage of some microseconds may be missed again and again.
    const auto come = [&] {
      const Stage at = seen.stage[rank];
      if (at >= Stage::close) return true;
      if (stage <= Stage::seal) return at >= stage;
      return seen.steps[rank] >= steps && (at == stage || seen.steps[rank] > steps + 100);
    };
    while (!come()) pause_us(20);
    pause_us(delay_us);
    seen.killed_in = seen.stage[rank].load();
    seen.killed_at = now();
    ::kill(::getpid(), SIGKILL);
  }).detach();
}

// Names in /dev/shm, and abstract sockets of jobs.
std::set<std::string> leftovers() {
  std::set<std::string> names;
  for (const auto &entry : std::filesystem::directory_iterator("/dev/shm")) names.insert(entry.path());
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);)
    if (const size_t at = line.find("@fsdp-"); at != line.npos) names.insert(line.substr(at));
  return names;
}

// Other tests begin and end on this machine, so only names that stay count as left over.
std::string new_leftovers(const std::set<std::string> &before) {
  std::set<std::string> left = leftovers();
  std::erase_if(left, [&](const std::string &name) { return before.contains(name); });
  for (const double end = now() + 10; !left.empty() && now() < end;) {
    pause_us(50'000);
    const auto still = leftovers();
    std::erase_if(left, [&](const std::string &name) { return !still.contains(name); });
  }
  std::string text;
  for (const std::string &name : left) text += name + " ";
  return text;
}

struct Kill {
  Stage stage;
  int count;
};

TEST(Death, IsNamedAtFiftyMoments) {
  const auto before = leftovers();
  std::minstd_rand random(20260729);
  double longest = 0, longest_destroy = 0;
  int killed_in[std::size(stage_names)] = {}, trial = 0, late = 0;
  for (const Kill &kill : {Kill{Stage::bootstrap, 6},
                           {Stage::seal, 9},
                           {Stage::forward, 8},
                           {Stage::backward, 9},
                           {Stage::finish, 7},
                           {Stage::step, 6},
                           {Stage::close, 5}})
    // Under a sanitizer fewer kills are enough.
    for (int i = 0; i < (is_sanitized() ? (kill.count + 2) / 3 : kill.count); ++i, ++trial) {
      const uint32_t ranks = 2 + static_cast<uint32_t>(trial) % 3, victim = static_cast<uint32_t>(random()) % ranks;
      const uint32_t steps = kill.stage >= Stage::forward ? static_cast<uint32_t>(random()) % 6 : 0;
      const uint64_t delay_us = i % 3 == 0 ? 0 : random() % (kill.stage == Stage::bootstrap ? 12'000 : 2'000);
      // A rank that has not come yet is unknown, so its death is a timeout.
      const uint32_t timeout_ms = kill.stage == Stage::bootstrap ? 1500 : 20'000;
      const uint32_t life = kill.stage == Stage::close ? steps : 1'000'000;
      World world(ranks);
      Seen &seen = world.seen();
      world.start([&](uint32_t rank) {
        if (rank == victim) doom(seen, rank, kill.stage, steps, delay_us);
        const Scenario scenario = mortal_scenario(ranks, timeout_ms);
        Report report = live_until_failure(scenario, rank, world.name(), seen, life);
        if (rank == victim)
          for (;;) pause_us(1000);  // the call failed before the rank was killed
        if (report.status != FSDP_OK) recover(world, rank, victim, seen, report);
        return report;
      });
      const bool all_ended = world.collect(20);
      const Stage in = seen.killed_in;
      const std::string where = "trial " + std::to_string(trial) + ", rank " + std::to_string(victim) + " of " +
                                std::to_string(ranks) + " killed in " + stage_names[static_cast<int>(in)];
      ASSERT_TRUE(all_ended) << where << ": a rank hangs";
      ++killed_in[static_cast<int>(in)];
      EXPECT_FALSE(world.heard(victim)) << where << ": " << world.report(victim).message;
      for (uint32_t r = 0; r < ranks; ++r) {
        if (r == victim) continue;
        const Report &report = world.report(r);
        ASSERT_TRUE(world.heard(r)) << where << ": rank " << r << " died too";
        // A rank that had done all its part may die: ranks that need nothing more from it close in good order.
        if (in >= Stage::close && report.status == FSDP_OK) continue;
        const std::string what = where + ": rank " + std::to_string(r) + " in " +
                                 stage_names[static_cast<int>(report.stage)] + ": " +
                                 fsdp_get_status_name(report.status) + " " + report.message;
        EXPECT_LT(report.destroy_seconds, at_once) << what;
        longest_destroy = std::max(longest_destroy, report.destroy_seconds);
        if (in == Stage::bootstrap && report.stage == Stage::bootstrap && report.status == FSDP_TIMEOUT) {
          // The victim had not joined yet, or this rank had not: it came after rank 0 gave up, and misses rank 0.
          ++late;
          const bool victim_joined = victim == 0 || world.report(0).status == FSDP_PEER_FAILED;
          EXPECT_EQ(report.rank, victim_joined ? 0 : static_cast<int32_t>(victim)) << what;
          EXPECT_LT(report.failed_at - seen.killed_at, 2.5 + at_once) << what;
          continue;
        }
        EXPECT_EQ(report.status, FSDP_PEER_FAILED) << what;
        EXPECT_EQ(report.rank, static_cast<int32_t>(victim)) << what;
        EXPECT_LT(report.failed_at - seen.killed_at, at_once) << what;
        longest = std::max(longest, report.failed_at - seen.killed_at);
        EXPECT_TRUE(report.recovered || in >= Stage::close) << what;
      }
    }
  EXPECT_EQ(new_leftovers(before), "");
  printf("%d kills:", trial);
  for (size_t s = 0; s < std::size(stage_names); ++s)
    if (killed_in[s]) printf(" %d in %s", killed_in[s], stage_names[s]);
  printf(
      "; slowest report %.1f ms after the kill, slowest destroy %.1f ms (worst scheduling delay %.1f ms); %d reports "
      "were timeouts of a rank that had not joined\n",
      1e3 * longest, 1e3 * longest_destroy, 1e3 * World::worst_delay, late);
}

// The last of the ranks never comes, and the victim dies while all others wait for it.
void kill_while_forming(World &world, uint32_t victim) {
  Seen &seen = world.seen();
  world.start([&](uint32_t rank) {
    if (rank + 1 == world.ranks()) {
      while (seen.killed_at == 0) pause_us(1000);
      pause_us(1'500'000);
      return Report{};
    }
    if (rank == victim) doom(seen, rank, Stage::bootstrap, 0, 1'000'000);
    return live_until_failure(mortal_scenario(world.ranks(), 15'000), rank, world.name(), seen, 1);
  });
}

// A rank that has joined and waits for one that does not come: its death is known at once to all that wait with it.
TEST(Death, IsNamedWhileTheJobForms) {
  for (const uint32_t victim : {0u, 1u, 2u}) {
    std::unique_ptr<World> world;
    // On a busy machine this rank or the victim may not have joined before the victim dies: that is a timeout.
    for (int tries = 0; tries < 5; ++tries) {
      world = std::make_unique<World>(4);
      kill_while_forming(*world, victim);
      ASSERT_TRUE(world->collect(30)) << "a rank hangs";
      bool joined = true;
      for (uint32_t r = 0; r < 3; ++r)
        if (r != victim) joined = joined && world->report(r).status != FSDP_TIMEOUT;
      if (joined) break;
    }
    for (uint32_t r = 0; r < 3; ++r) {
      if (r == victim) continue;
      const Report &report = world->report(r);
      EXPECT_EQ(report.status, FSDP_PEER_FAILED) << report.message;
      EXPECT_EQ(report.rank, static_cast<int32_t>(victim)) << report.message;
      EXPECT_LT(report.failed_at - world->seen().killed_at, at_once);
      printf("rank %u knew of the death of rank %u after %.1f ms\n", r, victim,
             1e3 * (report.failed_at - world->seen().killed_at));
    }
  }
}

// A process that crashes lives on, with all its open descriptors, until its core is written.
TEST(Death, ByASignalWhoseCoreTakesLongIsNamedAtOnce) {
  if (const std::string why = slow_core::missing(); !why.empty()) GTEST_SKIP() << why;
  const slow_core::Folder folder;
  World world(3);
  Seen &seen = world.seen();
  Scenario scenario = mortal_scenario(3, 60'000);
  scenario.context.heartbeat_timeout_ms = 30'000;
  world.start([&](uint32_t rank) {
    if (rank == 1)
      std::thread([&] {
        while (seen.steps[1] < 3) pause_us(20);
        seen.killed_at = now();
        slow_core::die(folder.path());
      }).detach();
    return live_until_failure(scenario, rank, world.name(), seen, 1'000'000);
  });
  for (const uint32_t rank : {0u, 2u}) {
    siginfo_t ended{};
    ::waitid(P_PID, static_cast<id_t>(world.pid(rank)), &ended, WEXITED | WNOWAIT);
  }
  ::kill(world.pid(1), SIGKILL);
  ASSERT_TRUE(world.collect(30)) << "a rank hangs";
  const std::string name = "rank 1 (pid " + std::to_string(world.pid(1)) + ", host ";
  for (const uint32_t rank : {0u, 2u}) {
    const Report &report = world.report(rank);
    EXPECT_EQ(report.status, FSDP_PEER_FAILED) << report.message;
    EXPECT_EQ(report.rank, 1) << report.message;
    EXPECT_STREQ(report.message, world.report(0).message);
    EXPECT_TRUE(std::string(report.message).ends_with(") is dumping core")) << report.message;
    EXPECT_LT(report.failed_at - seen.killed_at, at_once) << report.message;
  }
  printf("rank 0 knew after %.0f ms\n", 1e3 * (world.report(0).failed_at - seen.killed_at));
}

// The seconds until both had ended.
double kill_both(const World &world, uint32_t one, uint32_t other) {
  const double start = now();
  for (const uint32_t victim : {one, other}) ::kill(world.pid(victim), SIGKILL);
  siginfo_t ended{};
  for (const uint32_t victim : {one, other})
    ::waitid(P_PID, static_cast<id_t>(world.pid(victim)), &ended, WEXITED | WNOWAIT);
  return now() - start;
}

// Two deaths at once are one failure: every survivor names both ranks.
TEST(Death, OfTwoRanksAtOnceNamesBoth) {
  std::unique_ptr<World> world;
  // A rank that finds one dead looks for others for 40 ms: a busy machine may hold up the second death for longer.
  for (int tries = 0; tries < 5; ++tries) {
    world = std::make_unique<World>(4);
    Seen &seen = world->seen();
    world->start([&](uint32_t rank) {
      return live_until_failure(mortal_scenario(4, 20'000), rank, world->name(), seen, 1'000'000);
    });
    while (seen.steps[0] < 3) pause_us(100);
    const bool at_the_same_time = kill_both(*world, 1, 3) < 0.03;
    ASSERT_TRUE(world->collect(30)) << "a rank hangs";
    if (at_the_same_time || world->report(0).failed_count != 1) break;
  }
  EXPECT_EQ(world->report(0).status, FSDP_PEER_FAILED) << world->report(0).message;
  EXPECT_EQ(world->report(2).status, FSDP_PEER_FAILED) << world->report(2).message;
  EXPECT_EQ(world->report(0).rank, 1);
  EXPECT_STREQ(world->report(0).message, world->report(2).message);
  EXPECT_TRUE(std::string(world->report(0).message).ends_with(": ranks 1, 3 died")) << world->report(0).message;
  for (const uint32_t survivor : {0u, 2u}) {
    const Report &report = world->report(survivor);
    EXPECT_EQ(std::vector<uint32_t>(report.failed, report.failed + report.failed_count), (std::vector<uint32_t>{1, 3}));
  }
}

}  // namespace
