// SPDX-License-Identifier: Apache-2.0
// Variables for runs whose program cannot be changed: FSDP_LOG, FSDP_DEBUG, FSDP_TRACE, FSDP_TIMEOUT. Each variable has
// its effect, the program's own options take precedence, and an invalid value is refused with the variable's name.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "harness.h"
#include "trace_file.h"

using namespace harness;

namespace {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

constexpr const char *variables[] = {"FSDP_LOG", "FSDP_DEBUG", "FSDP_TRACE", "FSDP_TIMEOUT"};

void keep_line(void *lines, fsdp_log_level, const char *message) { static_cast<Lines *>(lines)->push_back(message); }

class Environment : public testing::Test {
 protected:
  void SetUp() override {
    clear();
    fs::create_directory(folder_);
  }
  void TearDown() override {
    clear();
    fs::remove_all(folder_);
  }
  static void clear() {
    for (const char *name : variables) ::unsetenv(name);
  }
  static void set(const char *name, const std::string &value) { ::setenv(name, value.c_str(), 1); }
  std::string file(const std::string &name) const { return (folder_ / name).string(); }

  const fs::path folder_ = testing::TempDir() + "environment_test." + std::to_string(::getpid());
};
using EnvironmentLog = Environment;
using EnvironmentDebug = Environment;
using EnvironmentTimeout = Environment;
using EnvironmentTrace = Environment;

Scenario small(uint32_t ranks) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
  setup.groups = equal_groups(2, 8, 8);
  return setup;
}

void live(const Scenario &setup) {
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_close_context(context));
  });
}

Lines standard_error(const Scenario &setup) {
  testing::internal::CaptureStderr();
  live(setup);
  std::istringstream text(testing::internal::GetCapturedStderr());
  Lines lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

TEST_F(EnvironmentLog, GoesToStandardErrorWithTheRankInFrontOfEachLine) {
  set("FSDP_LOG", "info");
  const Lines lines = standard_error(small(2));
  for (const char *rank : {"rank 0: ", "rank 1: "}) {
    const std::string wanted = std::string(rank) + "sealed a model of 2 groups";
    EXPECT_EQ(std::count_if(lines.begin(), lines.end(), [&](const auto &line) { return line.starts_with(wanted); }), 1)
        << wanted;
  }
  for (const std::string &line : lines) {
    EXPECT_TRUE(line.starts_with("rank 0: ") || line.starts_with("rank 1: ")) << line;
    EXPECT_EQ(line.find("rank 0: rank 0"), std::string::npos) << line;
  }
}

TEST_F(EnvironmentLog, ShowsNothingBelowItsLevelAndNothingIfItIsNotSet) {
  EXPECT_EQ(standard_error(small(1)), Lines());
  set("FSDP_LOG", "");  // counts as not set
  EXPECT_EQ(standard_error(small(1)), Lines());
  set("FSDP_LOG", "warning");
  EXPECT_EQ(standard_error(small(1)), Lines());
}

TEST_F(EnvironmentLog, DebugSaysWhereMemoryWent) {
  const auto tells = [](const Lines &lines, const std::string &what) {
    return std::count_if(lines.begin(), lines.end(),
                         [&](const std::string &line) { return line.find(what) != std::string::npos; });
  };
  set("FSDP_LOG", "info");
  EXPECT_EQ(tells(standard_error(small(1)), "optimizer state: "), 0);
  set("FSDP_LOG", "debug");
  const Lines lines = standard_error(small(1));
  uint64_t bytes = 0;
  const Scenario setup = small(1);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    FSDP(fsdp_get_allocated_bytes(rank.model, FSDP_ROLE_OPTIMIZER, &bytes));
    rank.load();
    FSDP(fsdp_close_context(context));
  });
  EXPECT_GE(bytes, 2u * 64 * 2 * sizeof(float));
  EXPECT_EQ(tells(lines, "rank 0: model 0: optimizer state: " + std::to_string(bytes) + " bytes"), 1);
  EXPECT_EQ(tells(lines, "sealed a model of 2 groups"), 1);
}

TEST_F(EnvironmentLog, OptionsOverrideTheVariable) {
  set("FSDP_LOG", "info");
  Scenario setup = small(1);
  setup.context.log_level = FSDP_LOG_ERROR;
  EXPECT_EQ(standard_error(setup), Lines());
  Lines kept;
  setup.context.log_level = 0;
  setup.context.log = keep_line;
  setup.context.log_data = &kept;
  EXPECT_EQ(standard_error(setup), Lines());
  EXPECT_FALSE(kept.empty());  // the level is that of the environment
}

// Returns whether a released view is full of NaN.
bool poisons(const Scenario &setup) {
  bool poisoned = true;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    fsdp_tensor view = FSDP_TENSOR_INIT;
    FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
    FSDP(fsdp_get_param(rank.groups[0], 0, FSDP_EVAL, &view));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
    if (r == 0) poisoned = std::isnan(*static_cast<const volatile float *>(view.data));
    FSDP(fsdp_close_context(context));
  });
  return poisoned;
}

TEST_F(EnvironmentDebug, TheVariableDoesWhatTheFlagDoes) {
  Scenario setup = small(2);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  EXPECT_FALSE(poisons(setup));
  set("FSDP_DEBUG", "0");
  EXPECT_FALSE(poisons(setup));
  set("FSDP_DEBUG", "1");
  EXPECT_TRUE(poisons(setup));
  setup.context.flags = FSDP_CONTEXT_NO_OVERLAP;  // to flags of the program's own it is added
  EXPECT_TRUE(poisons(setup));
}

// Rank 1 does not come.
void wait_in_vain(uint32_t timeout_ms, const char *told) {
  Scenario setup = small(2);
  setup.context.timeout_ms = timeout_ms;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    double one = 1;
    if (r == 0)
      require_error(fsdp_all_reduce_values(context, nullptr, &one, 1, FSDP_VALUE_SUM), FSDP_TIMEOUT, {"rank 1", told});
  });
}

TEST_F(EnvironmentTimeout, BoundsWaitsInSeconds) {
  set("FSDP_TIMEOUT", "1");
  wait_in_vain(0, "within 1000 ms");
  set("FSDP_TIMEOUT", "300");
  wait_in_vain(200, "within 200 ms");
}

TEST_F(EnvironmentTimeout, BoundsTheMeetingOfRanksToo) {
  set("FSDP_TIMEOUT", "1");
  const std::string rendezvous = "environment-" + std::to_string(::getpid());
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.world_size = 2;
  options.rendezvous = rendezvous.c_str();
  fsdp_context *context = nullptr;
  require_error(fsdp_create_context(&options, &context), FSDP_TIMEOUT, {"1 has not come", "1000 ms"});
}

TEST_F(EnvironmentTrace, IsWrittenWhenTheContextIsDestroyed) {
  set("FSDP_TRACE", folder_.string());
  live(small(2));
  for (const uint32_t rank : {0u, 1u}) {
    const TraceFile trace(file("trace-" + std::to_string(rank) + ".json"));
    EXPECT_FALSE(trace.lane(rank, "caller").empty());
  }
}

TEST_F(EnvironmentTrace, OptionOverridesTheVariable) {
  fs::create_directory(file("own"));
  set("FSDP_TRACE", folder_.string());
  Scenario setup = small(1);
  const std::string own = file("own");
  setup.context.trace_directory = own.c_str();
  live(setup);
  EXPECT_TRUE(fs::exists(file("own/trace-0.json")));
  EXPECT_FALSE(fs::exists(file("trace-0.json")));
  setup.context.trace_directory = "";
  live(setup);
  EXPECT_FALSE(fs::exists(file("trace-0.json")));
}

TEST_F(EnvironmentTrace, IsWrittenAfterAFailureAndKeepsTheEarlierTrace) {
  set("FSDP_TRACE", folder_.string());
  live(small(1));
  run_threads(small(1), [](uint32_t, fsdp_context *context) {
    FSDP(fsdp_begin_span(context, "the last"));
    FSDP(fsdp_end_span(context));
    FSDP(fsdp_abort_context(context, "test"));
  });
  EXPECT_EQ(TraceFile(file("trace-0.json")).of_category(0, "caller", "user").size(), 1u);
  EXPECT_TRUE(TraceFile(file("trace-0.json.1")).of_category(0, "caller", "user").empty());
}

TEST_F(EnvironmentTrace, UnwritableTraceIsAWarning) {
  Lines lines;
  Scenario setup = small(1);
  setup.context.log = keep_line;
  setup.context.log_data = &lines;
  set("FSDP_TRACE", file("nowhere"));
  live(setup);
  ASSERT_EQ(lines.size(), 2u);  // at the start, when there is time to do something, and at the end
  for (const std::string &line : lines) {
    EXPECT_NE(line.find("rank 0"), std::string::npos) << line;
    EXPECT_NE(line.find(file("nowhere")), std::string::npos) << line;
    EXPECT_NE(line.find("No such file or directory"), std::string::npos) << line;
  }
}

TEST_F(EnvironmentTrace, PlanningContextIgnoresTheVariable) {
  set("FSDP_TRACE", folder_.string());
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_plan_context(2, 0, nullptr, &context));
  fsdp_destroy_context(context);
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(Environment, InvalidVariablesAreRefusedByName) {
  const struct {
    const char *name, *value;
    std::vector<std::string> words;
  } cases[] = {{"FSDP_LOG", "loud", {"FSDP_LOG='loud'", "error, warning, info or debug"}},
               {"FSDP_LOG", "Info", {"FSDP_LOG='Info'"}},
               {"FSDP_DEBUG", "yes", {"FSDP_DEBUG='yes'", "0 or 1"}},
               {"FSDP_TIMEOUT", "10s", {"FSDP_TIMEOUT='10s'", "seconds", "from 1 to 4294967"}},
               {"FSDP_TIMEOUT", "0", {"FSDP_TIMEOUT='0'"}},
               {"FSDP_TIMEOUT", "-1", {"FSDP_TIMEOUT='-1'"}},
               {"FSDP_TIMEOUT", "4294968", {"FSDP_TIMEOUT='4294968'"}}};
  for (const auto &[name, value, words] : cases) {
    set(name, value);
    fsdp_context *context = nullptr;
    require_error(fsdp_create_local_contexts(1, nullptr, &context), FSDP_INVALID_ARGUMENT, words);
    require_error(fsdp_create_context(nullptr, &context), FSDP_INVALID_ARGUMENT, words);
    require_error(fsdp_create_plan_context(1, 0, nullptr, &context), FSDP_INVALID_ARGUMENT, words);
    clear();
  }
}

}  // namespace
