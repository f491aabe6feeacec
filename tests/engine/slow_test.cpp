// SPDX-License-Identifier: Apache-2.0
// A rank that is only slow is not dead; one that is too slow is a timeout that names it.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <new>

#include "death.h"

using namespace harness;

namespace {

void stop(const World &world, uint32_t rank) { ::kill(world.pid(rank), SIGSTOP); }
void go_on(const World &world, uint32_t rank) { ::kill(world.pid(rank), SIGCONT); }

void await_step(World &world, uint32_t rank, uint32_t step) {
  for (const double deadline = now() + 20; world.seen().steps[rank] < step && now() < deadline;) pause_us(100);
}

// Waits until these ranks have reported, at most as long as World::collect would wait.
void await_ends(const World &world, std::initializer_list<uint32_t> ranks) {
  const double deadline = now() + 30;
  for (const uint32_t rank : ranks) {
    siginfo_t ended{};
    while (::waitid(P_PID, static_cast<id_t>(world.pid(rank)), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           ended.si_pid == 0 && now() < deadline)
      pause_us(1000);
  }
}

// Stops a rank for a while as soon as it is at a step.
void stop_for(World &world, uint32_t rank, uint32_t step, uint64_t us) {
  await_step(world, rank, step);
  stop(world, rank);
  pause_us(us);
  go_on(world, rank);
}

TEST(Slow, ARankThatIsStoppedForAMomentIsNotDead) {
  constexpr uint32_t steps = 60;
  World world(3);
  world.start([&](uint32_t rank) {
    return live_until_failure(mortal_scenario(3, 20'000), rank, world.name(), world.seen(), steps);
  });
  for (const uint32_t rank : {0u, 1u, 2u}) stop_for(world, rank, 5 + 15 * rank, 400'000);
  ASSERT_TRUE(world.collect(60)) << "a rank hangs";
  for (uint32_t r = 0; r < 3; ++r) {
    ASSERT_TRUE(world.heard(r));
    EXPECT_EQ(world.report(r).status, FSDP_OK) << world.report(r).message;
    EXPECT_EQ(world.seen().steps[r], steps);
  }
}

TEST(Slow, ARankThatIsStoppedForTooLongIsATimeoutThatItLearnsOfToo) {
  World world(3);
  world.start([&](uint32_t rank) {
    return live_until_failure(mortal_scenario(3, 3000), rank, world.name(), world.seen(), 1'000'000);
  });
  await_step(world, 1, 5);
  stop(world, 1);
  await_ends(world, {0, 2});
  go_on(world, 1);
  ASSERT_TRUE(world.collect(30)) << "a rank hangs";
  for (uint32_t r = 0; r < 3; ++r) {
    EXPECT_EQ(world.report(r).status, FSDP_TIMEOUT) << world.report(r).message;
    EXPECT_EQ(world.report(r).rank, 1) << world.report(r).message;
  }
}

Scenario heard_scenario(uint32_t ranks, uint32_t heartbeat_timeout_ms) {
  Scenario scenario = mortal_scenario(ranks, 60'000);
  scenario.context.heartbeat_timeout_ms = heartbeat_timeout_ms;
  return scenario;
}

// Long before the timeout of the operation. The rank that was stopped learns it too, from its next wait.
TEST(Slow, ARankThatIsStoppedLongerThanTheHeartbeatLimitIsNamed) {
  World world(3);
  world.start([&](uint32_t rank) {
    return live_until_failure(heard_scenario(3, 1200), rank, world.name(), world.seen(), 1'000'000);
  });
  await_step(world, 1, 5);
  const double stopped_at = now();
  const std::string name = "rank 1 (pid " + std::to_string(world.pid(1)) + ", host ";
  stop(world, 1);
  await_ends(world, {0, 2});
  const double continued_at = now();
  go_on(world, 1);
  ASSERT_TRUE(world.collect(30)) << "a rank hangs";
  for (uint32_t r = 0; r < 3; ++r) {
    const Report &report = world.report(r);
    ASSERT_TRUE(world.heard(r));
    EXPECT_EQ(report.status, FSDP_PEER_FAILED) << "rank " << r << ": " << report.message;
    EXPECT_EQ(report.rank, 1) << report.message;
    EXPECT_STREQ(report.message, world.report(0).message);
    EXPECT_NE(std::string(report.message).find(name), std::string::npos) << report.message;
    EXPECT_NE(std::string(report.message).find("has not responded for 1.2 s: it is stopped or its host is overloaded"),
              std::string::npos)
        << report.message;
    const double failed_after = report.failed_at - (r == 1 ? continued_at : stopped_at);
    EXPECT_LT(failed_after, r == 1 ? at_once : 1.2 + at_once);
    EXPECT_TRUE(r == 1 || failed_after > 0.9) << report.message;
  }
  printf("named %.0f ms after the stop, limit 1200 ms\n", 1e3 * (world.report(0).failed_at - stopped_at));
}

TEST(Slow, TwoRanksStoppedAtOnceAreNamedTogether) {
  World world(4);
  world.start([&](uint32_t rank) {
    return live_until_failure(heard_scenario(4, 1000), rank, world.name(), world.seen(), 1'000'000);
  });
  await_step(world, 1, 3);
  // The observing ranks stand still until both are stopped, however long that takes: they count only silence that they
  // watch.
  for (const uint32_t r : {0u, 3u, 1u, 2u}) stop(world, r);
  for (const uint32_t r : {0u, 3u}) go_on(world, r);
  await_ends(world, {0, 3});
  for (const uint32_t r : {1u, 2u}) go_on(world, r);
  ASSERT_TRUE(world.collect(30)) << "a rank hangs";
  for (uint32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(world.report(r).status, FSDP_PEER_FAILED) << world.report(r).message;
    EXPECT_STREQ(world.report(r).message, world.report(0).message);
    const auto &report = world.report(r);
    EXPECT_EQ(std::vector<uint32_t>(report.failed, report.failed + report.failed_count), (std::vector<uint32_t>{1, 2}));
  }
  const std::string text = world.report(0).message;
  EXPECT_NE(text.find("ranks 1 (pid"), std::string::npos) << text;
  EXPECT_NE(text.find("have not responded for 1.0 s: they are stopped"), std::string::npos) << text;
}

// Ranks are stopped one after another, or all at once for longer than the limit, as on a suspended machine: the rank
// that wakes first has not watched the others and blames none.
TEST(Slow, StopsShorterThanTheLimitAndOfAllRanksAreNoFailure) {
  constexpr uint32_t steps = 40;
  World world(3);
  world.start([&](uint32_t rank) {
    return live_until_failure(heard_scenario(3, 1500), rank, world.name(), world.seen(), steps);
  });
  for (const uint32_t rank : {0u, 2u}) stop_for(world, rank, 3 + 3 * rank, 700'000);
  while (world.seen().steps[0] < 15) pause_us(100);
  for (uint32_t r = 0; r < 3; ++r) stop(world, r);
  pause_us(2'500'000);
  for (uint32_t r = 0; r < 3; ++r) {
    go_on(world, r);
    pause_us(100'000);
  }
  ASSERT_TRUE(world.collect(60)) << "a rank hangs";
  for (uint32_t r = 0; r < 3; ++r) {
    EXPECT_EQ(world.report(r).status, FSDP_OK) << world.report(r).message;
    EXPECT_EQ(world.seen().steps[r], steps);
  }
}

// Its caller computes; its monitor sends heartbeats.
TEST(Slow, ACallerThatComputesForLongerThanTheLimitIsNotStopped) {
  World world(2);
  world.start([&](uint32_t rank) {
    Report report;
    fsdp_context *context = nullptr;
    try {
      context = join(heard_scenario(2, 1000), rank, world.name());
      if (rank == 1) {
        volatile double sum = 0;
        for (const double end = now() + 2.5; now() < end;) sum = sum + 1;
      }
      double value = 1;
      FSDP(fsdp_all_reduce_values(context, nullptr, &value, 1, FSDP_VALUE_SUM));
      FSDP(fsdp_close_context(context));
    } catch (const Failure &failure) {
      report = describe(failure, Stage::forward);
    }
    fsdp_destroy_context(context);
    return report;
  });
  ASSERT_TRUE(world.collect(30)) << "a rank hangs";
  for (uint32_t r = 0; r < 2; ++r) EXPECT_EQ(world.report(r).status, FSDP_OK) << world.report(r).message;
}

TEST(Slow, AHeartbeatLimitUnderASecondIsRefusedEverywhere) {
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.world_size = 1;
  options.heartbeat_timeout_ms = 999;
  fsdp_context *contexts[2] = {};
  const auto refused = [&](fsdp_status status) {
    EXPECT_EQ(status, FSDP_INVALID_ARGUMENT);
    fsdp_error error = FSDP_ERROR_INIT;
    (void)fsdp_get_last_error(nullptr, &error);
    EXPECT_STREQ(error.message, "fsdp_context_options.heartbeat_timeout_ms: 999; it is at least 1000");
    for (fsdp_context *context : contexts) EXPECT_EQ(context, nullptr);
  };
  refused(fsdp_create_context(&options, contexts));
  refused(fsdp_create_local_contexts(2, &options, contexts));
  refused(fsdp_create_plan_context(2, 0, &options, contexts));
}

// The times at which the ranks reached the call that rank 2 does not make, in memory that the processes share.
class Starts {
 public:
  Starts() {
    void *shared = ::mmap(nullptr, sizeof(Times), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) throw std::runtime_error("mmap failed");
    times_ = new (shared) Times{};
  }
  ~Starts() { ::munmap(times_, sizeof(Times)); }
  Starts(const Starts &) = delete;
  Starts &operator=(const Starts &) = delete;
  std::atomic<double> &of(uint32_t rank) { return (*times_)[rank]; }

 private:
  using Times = std::array<std::atomic<double>, 2>;
  Times *times_;
};

constexpr uint32_t absence_timeout_ms = 3000;

// Rank 2 is there, but comes to nothing more, until the others have failed.
void stay_away(World &world) {
  const auto failed = [&](uint32_t rank) { return world.seen().stage[rank] == Stage::done; };
  for (const double deadline = now() + 20; !(failed(0) && failed(1)) && now() < deadline;) pause_us(1000);
}

Report live_but_for(Stage absent, World &world, Starts &starts, uint32_t rank) {
  const Scenario scenario = mortal_scenario(3, absence_timeout_ms);
  Report report;
  const auto absence = [&](Stage stage) {
    if (stage != absent) return false;
    if (rank == 2)
      stay_away(world);
    else
      starts.of(rank) = now();
    return rank == 2;
  };
  try {
    if (absence(Stage::bootstrap)) return report;
    fsdp_context *context = join(scenario, rank, world.name());
    Rank self(context, scenario, false);
    if (absence(Stage::seal)) return report;
    FSDP(fsdp_seal_model(self.model));
    self.load();
    if (absence(Stage::forward)) return report;
    forward(self, nullptr);
    backward(self, 0, 0, nullptr);
    FSDP(fsdp_finish_grads(self.model, 1.0, 0, nullptr));
    FSDP(fsdp_step_adamw(self.model, 0.01, nullptr, nullptr));
    if (absence(Stage::close)) return report;
    FSDP(fsdp_close_context(context));
  } catch (const Failure &failure) {
    report = describe(failure, absent);
  }
  world.seen().stage[rank] = Stage::done;
  return report;
}

TEST(Slow, ARankThatNeverComesIsATimeoutThatNamesIt) {
  constexpr Stage stages[] = {Stage::bootstrap, Stage::seal, Stage::forward, Stage::close};
  std::array<std::unique_ptr<World>, std::size(stages)> worlds;
  std::array<Starts, std::size(stages)> all_starts;
  // All at once: each only waits for its timeout.
  for (size_t i = 0; i < std::size(stages); ++i) {
    worlds[i] = std::make_unique<World>(3);
    worlds[i]->start([&](uint32_t rank) { return live_but_for(stages[i], *worlds[i], all_starts[i], rank); });
  }
  for (size_t i = 0; i < std::size(stages); ++i) {
    World &world = *worlds[i];
    Starts &starts = all_starts[i];
    ASSERT_TRUE(world.collect(30)) << "a rank hangs";
    // The rank that began to wait first times out for all of them.
    const double first = std::min(starts.of(0).load(), starts.of(1).load());
    for (uint32_t r = 0; r < 2; ++r) {
      const Report &report = world.report(r);
      const std::string what =
          std::string("absent at ") + stage_names[static_cast<int>(stages[i])] + ": " + report.message;
      EXPECT_EQ(report.status, FSDP_TIMEOUT) << what;
      EXPECT_EQ(report.rank, 2) << what;
      EXPECT_GT(report.failed_at - first, absence_timeout_ms / 1e3 - 0.05) << what;
      EXPECT_LT(report.failed_at - starts.of(r), absence_timeout_ms / 1e3 + at_once) << what;
      EXPECT_NE(std::string(report.message).find("rank 2"), std::string::npos) << what;
    }
  }
}

}  // namespace
