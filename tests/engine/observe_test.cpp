// SPDX-License-Identifier: Apache-2.0
// What a program can see: log lines on its own thread, the layout as text, counters of time, and the build.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "harness.h"

using namespace harness;

namespace {

struct Log {
  std::vector<std::pair<fsdp_log_level, std::string>> lines;
  std::vector<std::thread::id> threads;

  static void hook(void *self, fsdp_log_level level, const char *message) {
    static_cast<Log *>(self)->lines.emplace_back(level, message);
    static_cast<Log *>(self)->threads.push_back(std::this_thread::get_id());
  }
};

std::vector<std::pair<fsdp_log_level, std::string>> lines_at(fsdp_log_level level) {
  Log log;
  Scenario scenario;
  scenario.ranks = 1;
  scenario.groups = equal_groups(2, 8, 8);
  scenario.context.log = Log::hook;
  scenario.context.log_data = &log;
  scenario.context.log_level = level;
  std::thread::id rank_thread;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    rank_thread = std::this_thread::get_id();
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_close_context(context));
  });
  for (const std::thread::id thread : log.threads) EXPECT_EQ(thread, rank_thread);
  return log.lines;
}

TEST(Observe, LogLinesComeOnTheCallersThreadFromTheLevelAsked) {
  EXPECT_TRUE(lines_at(0).empty());  // warnings and errors only, and there are none
  const auto lines = lines_at(FSDP_LOG_INFO);
  ASSERT_FALSE(lines.empty());
  bool sealed = false;
  for (const auto &[level, message] : lines) {
    EXPECT_LE(level, FSDP_LOG_INFO);
    sealed = sealed || message.find("sealed a model of 2 groups, 128 elements") != std::string::npos;
  }
  EXPECT_TRUE(sealed);
}

TEST(Observe, TheLayoutIsTheSameTextOnEveryRankAndNamesEveryParameter) {
  Scenario scenario;
  scenario.ranks = 3;
  scenario.groups = odd_groups();
  scenario.groups[0].params[0].name = "a \"quoted\"\nname";
  std::vector<std::string> texts(3);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    uint64_t size = 0;
    FSDP(fsdp_describe_model(rank.model, nullptr, &size));
    std::vector<char> buffer(size);
    FSDP(fsdp_describe_model(rank.model, buffer.data(), &size));
    texts[r] = buffer.data();
    if (texts[r].size() + 1 != size) throw std::runtime_error("the size is not the text's");
    uint64_t small = 10;
    if (fsdp_describe_model(rank.model, buffer.data(), &small) != FSDP_INVALID_ARGUMENT || small != size)
      throw std::runtime_error("a buffer too small must say what is needed");
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
  EXPECT_NE(texts[0].find("\"a \\\"quoted\\\"\\u000aname\""), std::string::npos);
  for (size_t g = 1; g < scenario.groups.size(); ++g)
    for (const ParamDef &param : scenario.groups[g].params) {
      EXPECT_NE(texts[0].find("{\"name\": \"" + param.name + "\""), std::string::npos) << param.name;
    }
}

TEST(Observe, WaitingForASlowPeerIsCounted) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.groups = equal_groups(2, 8, 8);
  std::vector<uint64_t> waited(2);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    forward(rank, nullptr);
    double together = 1;
    FSDP(fsdp_all_reduce_values(context, nullptr, &together, 1, FSDP_VALUE_SUM));
    if (r == 1) pause_ms(1500);
    backward(rank, 0, 0, nullptr);
    FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
    waited[r] = rank.stats().wait_ns;
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
  EXPECT_GT(waited[0], 300'000'000u);
}

TEST(Observe, TheBuildSaysWhatItContains) {
  uint64_t size = 0;
  FSDP(fsdp_describe_build(nullptr, &size));
  std::vector<char> text(size);
  FSDP(fsdp_describe_build(text.data(), &size));
  const std::string build(text.data());
  EXPECT_EQ(build.find(std::string("version: ") + fsdp_get_version()), 0u);
  EXPECT_NE(build.find("instruction set: "), std::string::npos);
}

// Each variable with its value and where that is from; a secret is not shown.
TEST(Observe, TheBuildListsTheVariablesThatItReads) {
  ::setenv("FSDP_NET_INTERFACE", "two\nlines", 1);
  ::setenv("FSDP_JOB_SECRET", "not for others", 1);
  ::setenv("FSDP_TRACE", "", 1);
  uint64_t size = 0;
  FSDP(fsdp_describe_build(nullptr, &size));
  std::vector<char> text(size);
  FSDP(fsdp_describe_build(text.data(), &size));
  for (const char *name : {"FSDP_NET_INTERFACE", "FSDP_JOB_SECRET", "FSDP_TRACE"}) ::unsetenv(name);
  const std::string build(text.data());
  for (const char *line : {"\nFSDP_NET_INTERFACE: two?lines (environment)\n", "\nFSDP_JOB_SECRET: set (environment)\n",
                           "\nFSDP_TRACE: none (default)\n", "\nFSDP_NET_CHECKSUM: none (default)\n"})
    EXPECT_NE(build.find(line), std::string::npos) << line << build;
  EXPECT_EQ(build.find("not for others"), std::string::npos);
}

// This holds also if the job then does not form: these lines are all that the program learns about the reason.
TEST(Observe, RankZeroLogsTheRanksThatItRefused) {
  const std::string rendezvous = "refused-" + std::to_string(::getpid());
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  options.rendezvous = rendezvous.c_str();
  options.timeout_ms = 1500;
  const pid_t other = ::fork();
  if (other == 0) {
    options.world_size = 3;
    options.rank = 1;
    fsdp_context *context = nullptr;
    ::_exit(fsdp_create_context(&options, &context) == FSDP_MISMATCH ? 0 : 1);
  }
  Log log;
  options.world_size = 2;
  options.log = Log::hook;
  options.log_data = &log;
  fsdp_context *context = nullptr;
  EXPECT_EQ(fsdp_create_context(&options, &context), FSDP_TIMEOUT);
  ASSERT_FALSE(log.lines.empty());
  EXPECT_EQ(log.lines[0].first, FSDP_LOG_WARNING);
  EXPECT_EQ(log.lines[0].second,
            "rank 0: refused a process of this host: rank 1 says that the world has 3 ranks, rank 0 says 2");
  EXPECT_EQ(log.threads[0], std::this_thread::get_id());
  int status = -1;
  ::waitpid(other, &status, 0);
  EXPECT_EQ(status, 0) << "who was refused is not told so";
}

TEST(Observe, StepAndVersionAreCounted) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.steps = 3;
  scenario.groups = equal_groups(3, 8, 8);
  const auto outcomes = train_threads(scenario);
  EXPECT_EQ(outcomes[0].stats.step, 3u);
  EXPECT_EQ(outcomes[0].stats.version, 4u);
}

}  // namespace
