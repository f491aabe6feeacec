// SPDX-License-Identifier: Apache-2.0
// Ranks make different calls. Every rank learns it, with the names of both calls, soon after the later call. None
// hangs, and none goes on with wrong data. crossing_test.cpp has calls that cross only in their callers.
#include <gtest/gtest.h>

#include <random>

#include "death.h"
#include "desync_cases.h"

using namespace desync;

namespace {

// The promise is 2 s, but machines that run tests hold threads up. The limit is far below the timeout.
constexpr double soon = 10;

// Makes the calls of a rank that discards the step. It is a function of its own, since tests/tsan.supp names it.
[[gnu::noinline]] void call_until_discarded(const Body &body, Rank &rank) {
  const SanitizerFrame frame;
  body(rank);
}

void call(const Case &of, const Body &body, Rank &rank) {
  if (of.statuses == discardable) return call_until_discarded(body, rank);
  body(rank);
}

Report live_apart(const Case &of, const Scenario &scenario, uint32_t r, fsdp_context *context, bool odd, bool late) {
  Rank rank(context, scenario);
  rank.load();
  Report report;
  double start = now();
  try {
    // All ranks have entered this call before any rank goes on, but a delayed rank may still be in it when the others
    // fail.
    FSDP(fsdp_all_reduce_values(context, nullptr, std::vector<double>(1).data(), 1, FSDP_VALUE_SUM));
    if (late) pause_ms(300);
    start = now();
    call(of, odd ? of.odd : of.usual, rank);
    std::strncpy(report.message, "no call failed", sizeof report.message - 1);
  } catch (const Failure &failure) {
    report = describe(failure, Stage::done);
    std::strncpy(report.message, failure.what(), sizeof report.message - 1);
  }
  report.failed_at = now() - start;
  if (std::find(of.statuses.begin(), of.statuses.end(), report.status) == of.statuses.end()) report.recovered = -1;
  // A rank whose step failed aborts the job, so that a peer that still waits does not hang.
  if (report.status == FSDP_INVALID_STATE) fsdp_abort_context(context, "the test ends");
  report.rank = static_cast<int32_t>(r);
  return report;
}

void expect_apart(const Case &of, const Report &report) {
  const std::string what = std::string(of.name) + ", rank " + std::to_string(report.rank) + ": " +
                           fsdp_get_status_name(report.status) + ": " + report.message;
  EXPECT_EQ(report.recovered, 0) << what;
  for (const char *word : of.words)
    EXPECT_NE(std::string(report.message).find(word), std::string::npos) << word << " is not in: " << what;
  EXPECT_LT(report.failed_at, soon) << what;
}

Scenario scenario_for(uint32_t ranks) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, FSDP_UNSHARD_MAPPED);
  scenario.context.timeout_ms = 60'000;
  return scenario;
}

void part_threads(const Case &of, uint32_t ranks, uint32_t odd, uint32_t late) {
  const Scenario scenario = scenario_for(ranks);
  std::vector<Report> reports(ranks);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    reports[r] = live_apart(of, scenario, r, context, r == odd, r == late);
  });
  for (const Report &report : reports) expect_apart(of, report);
}

class Desync : public testing::TestWithParam<Case> {};

TEST_P(Desync, IsReportedToTwoThreads) {
  part_threads(GetParam(), 2, 1, 1);
  part_threads(GetParam(), 2, 0, 1);
}

TEST_P(Desync, IsReportedToFourThreads) { part_threads(GetParam(), 4, 2, 0); }

TEST_P(Desync, IsReportedToTwoProcesses) {
  const Case &of = GetParam();
  const Scenario scenario = scenario_for(2);
  World world(2);
  world.start([&](uint32_t r) {
    fsdp_context *context = join(scenario, r, world.name());
    const Report report = live_apart(of, scenario, r, context, r == 1, r == 0);
    return report;
  });
  ASSERT_TRUE(world.collect(30)) << "a rank hangs";
  for (uint32_t r = 0; r < 2; ++r) {
    ASSERT_TRUE(world.heard(r));
    expect_apart(of, world.report(r));
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, Desync, testing::ValuesIn(cases), [](const auto &info) { return info.param.name; });

// Replicas and hosts compute the same by themselves too: each way to have an outer axis, with the odd rank far from the
// others.
void part_outer(const Case &of, const Scenario &scenario) {
  std::vector<Report> reports(scenario.ranks);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    reports[r] = live_apart(of, scenario, r, context, r + 1 == scenario.ranks, r == 0);
  });
  for (const Report &report : reports) expect_apart(of, report);
}

class DesyncOfNumbers : public testing::TestWithParam<Case> {};

TEST_P(DesyncOfNumbers, IsFoundBetweenReplicas) {
  Scenario scenario = scenario_for(2);
  scenario.mesh.replicate_size = 2;
  part_outer(GetParam(), scenario);
  scenario.model.outer_strategy = FSDP_OUTER_OPTIM;
  part_outer(GetParam(), scenario);
}

TEST_P(DesyncOfNumbers, IsFoundBetweenHosts) {
  Scenario scenario = scenario_for(2);
  scenario.context.ranks_per_host = 1;
  part_outer(GetParam(), scenario);
}

// One case of each kind, except for norms, which replicas measure by themselves.
std::vector<Case> outer_cases() {
  std::vector<Case> chosen;
  for (const Case &of : number_cases)
    for (const char *name : {"AnotherBeta2", "AnotherStepNumber", "AnotherMaxNorm", "ApplyWithAnotherMaxNorm",
                             "AnotherFactor", "AScalingLeftOut", "AnotherOrderOfScalings"})
      if (std::string(of.name) == name) chosen.push_back(of);
  return chosen;
}

INSTANTIATE_TEST_SUITE_P(Numbers, Desync, testing::ValuesIn(number_cases),
                         [](const auto &info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Numbers, DesyncOfNumbers, testing::ValuesIn(outer_cases()),
                         [](const auto &info) { return info.param.name; });

// Three different calls: each rank is in a cycle of waits, or waits for a rank that is in one.
TEST(DesyncOfThree, ThreeDifferentCallsAreFound) {
  const Body calls[] = {then(all, finish), values(1), read_first};
  for (uint32_t turn = 0; turn < 3; ++turn) {
    const Scenario scenario = scenario_for(3);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      if (r == turn) pause_ms(200);
      const double start = now();
      try {
        calls[(r + turn) % 3](rank);
        throw std::runtime_error("no call failed");
      } catch (const Failure &failure) {
        require_error(failure.status, FSDP_MISMATCH, {"they wait for each other"});
      }
      REQUIRE(now() - start < soon);
    });
  }
}

// All ranks make the same calls, with pauses around the time between two checks: slow ranks get no error.
TEST(NotDesync, RanksAtTheirOwnPaceGetNoError) {
  for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, mode);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      std::mt19937 random(r);
      const auto dawdle = [&] { pause_ms(static_cast<int>(random() % 4 == 0 ? random() % 130 : 0)); };
      for (uint32_t i = 0; i < 12; ++i) {
        for (const size_t g : {embed, layer0, layer1, head}) {
          dawdle();
          FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
          FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        }
        for (const size_t g : {head, layer1, layer0, embed}) {
          dawdle();
          backward_group(rank, g, i, 0, nullptr);
        }
        dawdle();
        values(1)(rank);
        finish(rank);
        dawdle();
        step(rank);
      }
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
