// SPDX-License-Identifier: Apache-2.0
// A model does not fit into the memory cgroup of its ranks: all of them get an error at the seal, before the kernel
// would kill them. The test needs the right to make a cgroup.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "harness.h"

using namespace harness;

namespace {

std::string first_line_with(const char *file, const std::string &part) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);)
    if (line.find(part) != std::string::npos) return line;
  return {};
}

bool put(const std::string &file, const std::string &text) {
  std::ofstream stream(file);
  stream << text;
  stream.close();
  return !stream.fail();
}

// Below the one that this process is in; of whichever version has the memory controller here.
class Cgroup {
 public:
  explicit Cgroup(const std::string &name) {
    const std::string old = first_line_with("/proc/self/cgroup", ":memory:");
    const std::string line = old.empty() ? first_line_with("/proc/self/cgroup", "0::") : old;
    const std::string below = line.substr(line.rfind(':') + 1);
    unified_ = old.empty();
    path_ =
        std::string(unified_ ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory") + (below == "/" ? "" : below) + '/' + name;
    made_ = ::mkdir(path_.c_str(), 0755) == 0;
  }
  ~Cgroup() {
    if (made_) ::rmdir(path_.c_str());
  }
  bool limit(uint64_t bytes) const {
    return made_ && put(path_ + (unified_ ? "/memory.max" : "/memory.limit_in_bytes"), std::to_string(bytes));
  }
  bool enter() const { return put(path_ + "/cgroup.procs", std::to_string(::getpid())); }
  const std::string &path() const { return path_; }

 private:
  std::string path_;
  bool unified_ = false, made_ = false;
};

Scenario large_model() {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.context.timeout_ms = 20'000;
  scenario.groups = equal_groups(4, 1024, 1024);
  return scenario;
}

// The error of each rank's seal; the status to exit with: 0 if they are one OUT_OF_MEMORY with all these words.
int seal(const Scenario &scenario, const std::vector<std::string> &words) {
  std::set<std::string> texts;
  std::vector<std::string> errors(scenario.ranks);
  run_threads(
      scenario,
      [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, scenario, false);
        if (fsdp_seal_model(rank.model) == FSDP_OK) return;
        fsdp_error error = FSDP_ERROR_INIT;
        fsdp_get_last_error(context, &error);
        errors[r] =
            error.status == FSDP_OUT_OF_MEMORY ? error.message : "another status: " + std::string(error.message);
      },
      nullptr);
  for (const std::string &error : errors) texts.insert(error);
  bool right = texts.size() == 1;
  for (const std::string &word : words) right = right && texts.begin()->find(word) != std::string::npos;
  if (words.empty()) right = right && texts.begin()->empty();
  if (!right)
    for (const std::string &text : texts) std::fprintf(stderr, "a rank says: '%s'\n", text.c_str());
  return right ? 0 : 1;
}

// In a process of its own, which the kernel may kill.
int in_cgroup(const Cgroup &cgroup, const std::function<int()> &body) {
  const pid_t process = ::fork();
  if (process == 0) ::_exit(cgroup.enter() ? body() : 77);
  int status = 0;
  ::waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

uint64_t planned_bytes(const Scenario &scenario) {
  uint64_t bytes = 0;
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    const Rank rank(context, scenario);
    if (r == 0) bytes = memory_of(rank.model, r).role_bytes[0];
  });
  return bytes;
}

TEST(Room, RanksOfOneCgroupAreCountedTogether) {
  const Scenario scenario = large_model();
  const uint64_t one = planned_bytes(scenario);
  ASSERT_GT(one, uint64_t{32} << 20);  // what else the process needs is small against it
  const uint64_t limit = (one + one / 2) / 4096 * 4096;
  const Cgroup outer("fsdp-test-" + std::to_string(::getpid()));
  if (!outer.limit(limit)) GTEST_SKIP() << "cannot make a cgroup with a limit at " << outer.path();
  EXPECT_EQ(
      in_cgroup(
          outer,
          [&] {
            return seal(scenario, {"fsdp_seal_model", outer.path(), " bytes free", "limit " + std::to_string(limit)});
          }),
      0);
  Scenario alone = scenario;
  alone.ranks = 1;
  alone.groups = equal_groups(2, 1024, 1024);
  EXPECT_EQ(in_cgroup(outer, [&] { return seal(alone, {}); }), 0);
  ASSERT_TRUE(outer.limit(3 * one));
  EXPECT_EQ(in_cgroup(outer, [&] { return seal(scenario, {}); }), 0);
}

}  // namespace
