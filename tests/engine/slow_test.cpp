// SPDX-License-Identifier: Apache-2.0
// A rank that is only slow is not dead; one that is too slow is a timeout that names it.
#include <gtest/gtest.h>

#include "death.h"

using namespace harness;

namespace {

// Stops a rank for a while as soon as it is at a step.
void stop_for(World &world, uint32_t rank, uint32_t step, uint64_t us) {
  const double deadline = now() + 20;
  while (world.seen().steps[rank] < step && now() < deadline) pause_us(100);
  ::kill(world.pid(rank), SIGSTOP);
  pause_us(us);
  ::kill(world.pid(rank), SIGCONT);
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
    return live_until_failure(mortal_scenario(3, 500), rank, world.name(), world.seen(), 1'000'000);
  });
  stop_for(world, 1, 5, 1'500'000);
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

// Long before the timeout of the operation. Who was stopped learns it too, from its next wait.
TEST(Slow, ARankThatIsStoppedLongerThanTheHeartbeatLimitIsNamed) {
  World world(3);
  world.start([&](uint32_t rank) {
    return live_until_failure(heard_scenario(3, 1200), rank, world.name(), world.seen(), 1'000'000);
  });
  const double deadline = now() + 20;
  while (world.seen().steps[1] < 5 && now() < deadline) pause_us(100);
  const double stopped_at = now();
  const std::string name = "rank 1 (pid " + std::to_string(world.pid(1)) + ", host ";
  ::kill(world.pid(1), SIGSTOP);
  pause_us(3'500'000);
  const double continued_at = now();
  ::kill(world.pid(1), SIGCONT);
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
    const double limit = 0.2 + allowed_seconds();
    const double failed_after = report.failed_at - (r == 1 ? continued_at : stopped_at);
    EXPECT_LT(failed_after, r == 1 ? limit : 1.2 + limit);
    EXPECT_TRUE(r == 1 || failed_after > 0.9) << report.message;
  }
  printf("named %.0f ms after the stop, limit 1200 ms\n", 1e3 * (world.report(0).failed_at - stopped_at));
}

TEST(Slow, TwoRanksThatAreStoppedAtOnceAreASet) {
  World world(4);
  world.start([&](uint32_t rank) {
    return live_until_failure(heard_scenario(4, 1000), rank, world.name(), world.seen(), 1'000'000);
  });
  const double deadline = now() + 20;
  while (world.seen().steps[1] < 3 && now() < deadline) pause_us(100);
  for (const uint32_t r : {1u, 2u}) ::kill(world.pid(r), SIGSTOP);
  pause_us(2'500'000);
  for (const uint32_t r : {1u, 2u}) ::kill(world.pid(r), SIGCONT);
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

// Stopped one after another, or all at once and for longer than the limit, as a machine that was suspended: whoever
// wakes first has not watched the others and judges nobody.
TEST(Slow, StopsShorterThanTheLimitAndOfAllRanksAreNoFailure) {
  constexpr uint32_t steps = 40;
  World world(3);
  world.start([&](uint32_t rank) {
    return live_until_failure(heard_scenario(3, 1500), rank, world.name(), world.seen(), steps);
  });
  for (const uint32_t rank : {0u, 2u}) stop_for(world, rank, 3 + 3 * rank, 700'000);
  while (world.seen().steps[0] < 15) pause_us(100);
  for (uint32_t r = 0; r < 3; ++r) ::kill(world.pid(r), SIGSTOP);
  pause_us(2'500'000);
  for (uint32_t r = 0; r < 3; ++r) {
    ::kill(world.pid(r), SIGCONT);
    pause_us(100'000);
  }
  ASSERT_TRUE(world.collect(60)) << "a rank hangs";
  for (uint32_t r = 0; r < 3; ++r) {
    EXPECT_EQ(world.report(r).status, FSDP_OK) << world.report(r).message;
    EXPECT_EQ(world.seen().steps[r], steps);
  }
}

// Its caller computes; its monitor beats.
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

TEST(Slow, ARankThatNeverComesIsATimeoutThatNamesIt) {
  for (const Stage absent : {Stage::bootstrap, Stage::seal, Stage::forward, Stage::close}) {
    World world(3);
    world.start([&](uint32_t rank) {
      Scenario scenario = mortal_scenario(3, 500);
      fsdp_context *context = nullptr;
      Report report;
      if (rank == 2 && absent == Stage::bootstrap) {
        pause_us(1'400'000);
        return report;
      }
      double start = now();
      try {
        context = join(scenario, rank, world.name());
        Rank self(context, scenario, false);
        const auto absence = [&](Stage stage) {
          start = now();
          if (rank == 2 && absent == stage) pause_us(1'400'000);
          return rank == 2 && absent == stage;
        };
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
        report.failed_at -= start;
      }
      return report;
    });
    ASSERT_TRUE(world.collect(30)) << "a rank hangs";
    for (uint32_t r = 0; r < 2; ++r) {
      const Report &report = world.report(r);
      const std::string what =
          std::string("absent at ") + stage_names[static_cast<int>(absent)] + ": " + report.message;
      EXPECT_EQ(report.status, FSDP_TIMEOUT) << what;
      EXPECT_EQ(report.rank, 2) << what;
      EXPECT_GT(report.failed_at, 0.45) << what;
      EXPECT_LT(report.failed_at, 0.2 + allowed_seconds()) << what;
      EXPECT_NE(std::string(report.message).find("rank 2"), std::string::npos) << what;
    }
  }
}

}  // namespace
