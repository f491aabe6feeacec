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
        FSDP(fsdp_finish_grads(self.model, 1.0, nullptr));
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
