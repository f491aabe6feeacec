// SPDX-License-Identifier: Apache-2.0
// Home files on disks that fail, are full or stand still. Each error says what was read or written, and nothing hangs.
#include <gtest/gtest.h>

#include <barrier>
#include <cerrno>
#include <chrono>

#include "../unit/system_faults.h"
#include "checkpoint_folder.h"
#include "optimizer_memory.h"

using namespace harness;

namespace home_faults_test {
namespace {

using fsdp::test::FaultScope;
using fsdp::test::SystemFault;
using Way = SystemFault::Way;

Scenario in_file(uint32_t ranks) {
  Scenario setup = one_parameter("w", 100'000, {"", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_ADAMW}, 0);
  setup.ranks = ranks;
  setup.model.state_home = setup.model.main_home = FSDP_HOME_FILE;
  setup.model.home_directory = "/var/tmp";
  setup.model.turn_bytes = 65536;
  setup.context.timeout_ms = 20'000;
  return setup;
}

struct Seen {
  fsdp_status status = FSDP_OK;
  std::string message;
  int32_t rank = -1;
  int64_t code = 0;
};

Seen last_error() {
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(nullptr, &error);
  return {error.status, error.message, error.rank, error.origin_code};
}

// Makes a model on each rank, and then a step while `fault` is in force. Returns what each rank's step said.
std::vector<Seen> step_with(const Scenario &setup, const SystemFault &fault) {
  std::vector<Seen> seen(setup.ranks);
  std::optional<FaultScope> scope;
  std::mutex mutex;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    clean_step(rank, 0);
    finish_step(rank, 1);
    {
      const std::lock_guard lock(mutex);
      if (!scope) scope.emplace(fault);
    }
    if (fsdp_step_adamw(rank.model, 0.1, nullptr, stream()) != FSDP_OK) seen[r] = last_error();
    if (seen[r].status != FSDP_OK) {
      EXPECT_NE(fsdp_begin_update(rank.model, stream()), FSDP_OK);
    }
  });
  EXPECT_TRUE(scope->happened());
  return seen;
}

TEST(HomeFaults, AnErrorOfTheDiskNamesTheBytesAndTheWayBack) {
  for (const char *call : {"pread", "pwrite"})
    for (const int code : {EIO, ENOSPC, EROFS}) {
      const std::vector<Seen> seen = step_with(in_file(1), {Way::fails, 1, code, call});
      EXPECT_EQ(seen[0].status, FSDP_SYSTEM) << seen[0].message;
      EXPECT_EQ(seen[0].code, code) << seen[0].message;
      EXPECT_EQ(seen[0].rank, 0) << seen[0].message;
      for (const char *word : {"fsdp_step_adamw: rank 0: the file of home_directory '/var/tmp'",
                               std::string_view(call) == "pread" ? "reading" : "writing", " bytes at ",
                               "the context has failed", "load the last checkpoint"})
        EXPECT_NE(seen[0].message.find(word), std::string::npos) << word << " in " << seen[0].message;
    }
}

// Calls from the first to near the last of a step: each segment reads and writes three planes.
TEST(HomeFaults, EachFailedCallOfAStepIsAnError) {
  for (const char *call : {"pread", "pwrite"}) {
    {
      const std::vector<Seen> seen = step_with(in_file(1), {Way::waits, 0, 1, call});
      EXPECT_EQ(seen[0].status, FSDP_OK) << seen[0].message;
    }
    for (int at = 0; at < 3 * 19; at += 7) {
      const std::vector<Seen> seen = step_with(in_file(1), {Way::fails, at, EIO, call});
      EXPECT_EQ(seen[0].status, FSDP_SYSTEM) << call << " " << at;
    }
  }
}

TEST(HomeFaults, OtherRanksLearnWhichRanksDiskFailed) {
  const std::vector<Seen> seen = step_with(in_file(3), {Way::fails, 2, EIO, "pread"});
  int failed = 0;
  for (const Seen &one : seen) failed += one.status == FSDP_SYSTEM;
  EXPECT_GE(failed, 1);
  for (const Seen &one : seen) {
    if (one.status == FSDP_OK) continue;
    EXPECT_NE(one.message.find("the file of home_directory"), std::string::npos) << one.message;
  }
}

TEST(HomeFaults, PartsOfReadsAndWritesAreCompleted) {
  for (const char *call : {"pread", "pwrite"}) {
    const Scenario setup = in_file(2);
    std::vector<Outcome> outcomes;
    {
      const FaultScope scope({Way::does_a_part, -1, 0, call});
      outcomes = train_threads(setup);
      EXPECT_TRUE(scope.happened());
    }
    EXPECT_EQ(difference(setup, outcomes), "") << call;
  }
}

// A file system that refuses direct I/O at a read or write is used through the cache.
TEST(HomeFaults, AFileSystemWithoutDirectIoIsUsedThroughTheCache) {
  for (const int at : {0, 5}) {
    const Scenario setup = in_file(2);
    std::vector<Outcome> outcomes;
    {
      const FaultScope scope({Way::fails, at, EINVAL, "pread"});
      outcomes = train_threads(setup);
      EXPECT_TRUE(scope.happened());
    }
    EXPECT_EQ(difference(setup, outcomes), "") << at;
  }
}

TEST(HomeFaults, SlowCallsOfTheDiskChangeNoBit) {
  const Scenario setup = in_file(2);
  for (const char *call : {"pread", "pwrite"}) {
    std::vector<Outcome> outcomes;
    {
      const FaultScope scope({Way::waits, -1, 2, call});
      outcomes = train_threads(setup);
    }
    EXPECT_EQ(difference(setup, outcomes), "") << call;
    EXPECT_GT(outcomes[0].stats.home_wait_ns, 1'000'000u);
  }
}

TEST(HomeFaults, ADiskThatStandsStillIsATimeoutOfTheFile) {
  for (const char *call : {"pread", "pwrite"}) {
    Scenario setup = in_file(1);
    setup.context.timeout_ms = 300;
    const auto before = std::chrono::steady_clock::now();
    const std::vector<Seen> seen = step_with(setup, {Way::stands, 1, 0, call});
    EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(10));
    EXPECT_EQ(seen[0].status, FSDP_SYSTEM);
    EXPECT_EQ(seen[0].code, ETIMEDOUT);
    EXPECT_NE(seen[0].message.find("the disk has moved no byte for 225 ms"), std::string::npos) << seen[0].message;
  }
}

// A rank that fails outside of a step would leave the others in the collective.
TEST(HomeFaults, AFailedReadOfAParameterFailsTheContextOfAllRanks) {
  const Scenario setup = in_file(2);
  std::vector<Seen> seen(setup.ranks);
  std::optional<FaultScope> scope;
  std::mutex mutex;
  std::barrier published(2);  // loads read the file, too
  const auto before = std::chrono::steady_clock::now();
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    published.arrive_and_wait();
    std::vector<float> values(100'000);
    {
      const std::lock_guard lock(mutex);
      if (!scope) scope.emplace(SystemFault{Way::fails, 0, EIO, "pread"});
    }
    if (fsdp_read_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0) != FSDP_OK)
      seen[r] = last_error();
    EXPECT_NE(fsdp_begin_update(rank.model, stream()), FSDP_OK);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(10));
  for (const Seen &one : seen)
    EXPECT_NE(one.message.find("the file of home_directory '/var/tmp': reading"), std::string::npos) << one.message;
}

// ---- the seal ----

// States in 8 bits are written at the seal, 1 MiB at a time.
TEST(HomeFaults, ALongSealTellsHowFarItIs) {
  std::vector<std::string> lines;
  Scenario setup = one_parameter("w", uint64_t{9} << 20, {"", FSDP_MAIN_SPLIT16, FSDP_OPTIMIZER_ADAMW_8BIT}, 0);
  setup.ranks = 1;
  setup.model.state_home = FSDP_HOME_FILE;
  setup.model.home_directory = "/var/tmp";
  setup.context.log_level = FSDP_LOG_INFO;
  setup.context.log_data = &lines;
  setup.context.log = [](void *data, fsdp_log_level, const char *line) {
    static_cast<std::vector<std::string> *>(data)->emplace_back(line);
  };
  {
    const FaultScope scope({Way::waits, -1, 300, "pwrite"});
    run_threads(setup, [&](uint32_t, fsdp_context *context) { const Rank rank(context, setup); });
  }
  std::erase_if(lines, [](const std::string &line) { return line.find("of states in 8 bits") == std::string::npos; });
  ASSERT_GE(lines.size(), 2u);
  for (const char *word : {"fsdp_seal_model: rank 0 has written ", " of 9437184 bytes of states in 8 bits"})
    EXPECT_NE(lines[0].find(word), std::string::npos) << lines[0];
}

// The number of the fallocate that makes room in the first home file. Earlier ones are for memory that ranks share; the
// file's comes right after the calls that open it.
int room_call(const Scenario &setup) {
  std::vector<std::string> log;
  {
    const FaultScope scope({Way::none, 0, 0, ""});
    run_threads(setup, [&](uint32_t, fsdp_context *context) { const Rank rank(context, setup); });
    log = scope.log();
  }
  int before = 0;
  for (size_t i = 1; i < log.size(); ++i) {
    if (log[i] == "fallocate" && log[i - 1] == "openat") return before;
    before += log[i - 1] == "fallocate";
  }
  ADD_FAILURE() << "no call makes room";
  return 0;
}

std::string seal_with(const SystemFault &fault, uint32_t ranks) {
  const Scenario setup = in_file(ranks);
  std::vector<std::string> errors;
  const FaultScope scope(fault);
  run_threads(
      setup, [&](uint32_t, fsdp_context *context) { const Rank rank(context, setup); }, &errors);
  EXPECT_TRUE(scope.happened());
  for (const std::string &error : errors) EXPECT_EQ(error, errors[0]);
  return errors[0];
}

TEST(HomeFaults, AFullDiskFailsTheSealOnAllRanksWithTheBytes) {
  const std::string error = seal_with({Way::fails, room_call(in_file(2)), ENOSPC, "fallocate"}, 2);
  for (const char *word : {"SYSTEM", "the file of home_directory '/var/tmp'", "reserving 602112 bytes on a disk with ",
                           " bytes free", "No space left on device"})
    EXPECT_NE(error.find(word), std::string::npos) << word << " in " << error;
}

TEST(HomeFaults, FilesThatCannotBeMadeFailTheSeal) {
  for (const int code : {EACCES, EMFILE, EROFS}) {
    const std::string error = seal_with({Way::fails, 0, code, "openat"}, 1);
    EXPECT_NE(error.find("the file of home_directory '/var/tmp'"), std::string::npos) << error;
  }
}

// A file system that cannot reserve room gets zeros, and one without unnamed files gets a name that is removed at once.
TEST(HomeFaults, FileSystemsThatCanDoLessAreUsed) {
  for (const SystemFault &fault :
       {SystemFault{Way::fails, room_call(in_file(1)), EOPNOTSUPP, "fallocate"},
        SystemFault{Way::fails, 1, EOPNOTSUPP, "openat"}, SystemFault{Way::fails, 1, EINVAL, "openat"}}) {
    Scenario setup = in_file(1);
    std::vector<Outcome> outcomes;
    {
      const FaultScope scope(fault);
      outcomes = train_threads(setup);
      EXPECT_TRUE(scope.happened());
    }
    EXPECT_EQ(difference(setup, outcomes), "") << fault.call;
  }
}

}  // namespace
}  // namespace home_faults_test
