// SPDX-License-Identifier: Apache-2.0
// Tests files and folders of checkpoints on real file systems. Every one of their system calls fails once, and is once
// the process's last.
#include "checkpoint_folders.h"

namespace fsdp::checkpoint {
namespace {

INSTANTIATE_TEST_SUITE_P(On, Files, testing::Values("/var/tmp", "/dev/shm"),
                         [](const auto &info) { return std::string(info.index ? "Memory" : "Disk"); });

TEST_P(Files, HoldWhatWasWrittenAndNoMore) {
  for (const size_t size : {0, 1, 4095, 4096, 4097, 100'000}) {
    const std::string name = "f" + std::to_string(size), text = random_text(size);
    write_file(folder.get(), name, "shown", text);
    EXPECT_EQ(text_of(name), text);
    struct stat status {};
    ASSERT_EQ(::stat((path + "/" + name).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
  }
}

TEST_P(Files, AnExistingNameIsNotOpened) {
  put("there", "x");
  ASSERT_EQ(::symlink("elsewhere", (path + "/link").c_str()), 0);
  for (const char *name : {"there", "link"}) {
    const Error error = error_of([&] { OutFile(folder.get(), name, "a/file"); });
    EXPECT_EQ(error.status, FSDP_SYSTEM);
    EXPECT_EQ(error.origin_code, EEXIST);
    EXPECT_TRUE(has(error, "a/file: cannot be created: File exists"));
  }
  EXPECT_EQ(text_of("there"), "x");
}

TEST_P(Files, AreReadFromAnyByteOn) {
  const std::string text = random_text(50'001);
  put("f", text);
  const InFile file(folder.get(), "f", "f");
  EXPECT_EQ(file.bytes(), text.size());
  for (const auto &[offset, count] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 50'001}, {0, 1}, {4095, 2}, {4096, 4096}, {8191, 12'290}, {50'000, 1}, {49'000, 1001}, {77, 0}}) {
    const AlignedBytes buffer(InFile::needed_for(offset, count));
    const auto bytes = file.read(offset, count, buffer.bytes());
    EXPECT_EQ(std::string(reinterpret_cast<const char *>(bytes.data()), bytes.size()), text.substr(offset, count));
  }
}

// An ordinary open would wait for ever for a writer of the pipe.
TEST_P(Files, AreNothingElse) {
  ASSERT_EQ(::mkfifo((path + "/pipe").c_str(), 0600), 0);
  ASSERT_EQ(::mkdir((path + "/folder").c_str(), 0700), 0);
  put("there", "x");
  ASSERT_EQ(::symlink("there", (path + "/link").c_str()), 0);
  EXPECT_TRUE(has(error_of([&] { InFile(folder.get(), "pipe", "a/pipe"); }), "a/pipe: is no regular file"));
  EXPECT_TRUE(has(error_of([&] { InFile(folder.get(), "folder", "a/folder"); }), "a/folder: "));
  EXPECT_TRUE(has(error_of([&] { InFile(folder.get(), "link", "a/link"); }), "a/link: is a symbolic link"));
  EXPECT_TRUE(has(error_of([&] { InFile(folder.get(), "none", "a/none"); }), "a/none: cannot be opened: No such file"));
}

TEST_P(Files, CutOffWhileTheyAreReadAreToldSo) {
  put("f", random_text(20'000));
  const InFile file(folder.get(), "f", "a/file");
  fs::resize_file(path + "/f", 9000);
  const AlignedBytes buffer(20'480);
  EXPECT_TRUE(has(error_of([&] { file.read(0, 20'000, buffer.bytes()); }),
                  "a/file: ends after 9000 bytes; 20000 bytes at 0 were to be read"));
}

TEST_P(Files, AreWholeThoughCallsDoAPartOrAreInterrupted) {
  const std::string text = random_text(40'000);
  for (const int code : {EINTR, EINVAL, 0}) {
    const std::string name = "f" + std::to_string(code);
    {
      const FaultScope fault({code ? Way::fails : Way::does_a_part, 0, code, "pwrite"});
      write_file(folder.get(), name, name, text);
      EXPECT_TRUE(fault.happened());
    }
    EXPECT_EQ(text_of(name), text);
    const InFile file(folder.get(), name, name);
    const AlignedBytes buffer(InFile::needed_for(10, 30'000));
    const FaultScope fault({code ? Way::fails : Way::does_a_part, 0, code, "pread"});
    const auto bytes = file.read(10, 30'000, buffer.bytes());
    EXPECT_TRUE(fault.happened());
    EXPECT_EQ(std::memcmp(bytes.data(), text.data() + 10, bytes.size()), 0);
  }
}

// ---- the order of writes to the disk ----

// All files of a checkpoint are on the disk before it gets its name. The name is on the disk before the call reports
// success.
TEST_P(Files, AreOnTheDiskBeforeTheirName) {
  save(path, 1, 1);
  std::vector<std::string> log;
  {
    const FaultScope all({});
    save(path, 2, 2);
    log = all.log();
  }
  const auto named = std::ranges::find(log, "renameat2");
  ASSERT_NE(named, log.end());
  const std::vector<std::string> before(log.begin(), named), after(named, log.end());
  // The fsyncs are for two files of data, the manifest, the folder inside, and the checkpoint's own folder.
  EXPECT_EQ(std::ranges::count(before, "fsync"), 5);
  const auto last_write = std::ranges::find(before.rbegin(), before.rend(), "pwrite");
  const auto last_sync = std::ranges::find(before.rbegin(), before.rend(), "fsync");
  EXPECT_LT(last_sync - before.rbegin(), last_write - before.rbegin());
  EXPECT_EQ(std::ranges::count(after, "fsync"), 1);
  EXPECT_EQ(std::ranges::count(after, "pwrite"), 0);
}

// The disk cannot keep written data. Whichever fsync reports it, no checkpoint gets the name, except if it is the fsync
// of the name itself.
TEST_P(Files, ThatDoNotReachTheDiskAreNoCheckpoint) {
  save(path, 1, 1);
  for (int at = 0; at < 6; ++at) {
    Error error(FSDP_OK, "");
    {
      const FaultScope fault({Way::fails, at, EIO, "fsync"});
      error = error_of([&] { save(path, 2, 2); });
      ASSERT_TRUE(fault.happened()) << at;
    }
    EXPECT_EQ(error.origin_code, EIO) << at;
    const bool named = at == 5;
    EXPECT_EQ(whole_steps(path), named ? (std::vector<uint64_t>{2, 1}) : std::vector<uint64_t>{1}) << at;
    EXPECT_TRUE(!named || has(error, path + "/step-0000000002 has its name, but might lose it with the power: "));
  }
}

// ---- every call ----

// The save writes into an existing folder.
int calls_of_a_save(const std::string &path) {
  save(path, 1, 1);
  const FaultScope count({});
  save(path, 2, 2);
  return count.calls();
}

TEST_P(Files, SurviveEveryFailedCall) {
  const int calls = calls_of_a_save(path + "/count");
  ASSERT_GT(calls, 25);
  const std::string runs = path + "/runs";
  constexpr int codes[] = {ENOSPC, EIO, EDQUOT, EROFS};
  for (const int code : codes)
    for (int at = 0; at < calls; ++at) {
      // Each call fails in one way, or in all ways if there is time.
      if (!std::getenv("FSDP_TEST_MANY") && codes[at % 4] != code) continue;
      fs::remove_all(runs);
      save(runs, 1, 1);
      Error error(FSDP_OK, "");
      std::string call;
      {
        const FaultScope fault({Way::fails, at, code, ""});
        error = error_of([&] { save(runs, 2, 2); });
        call = fault.what();
      }
      const std::vector<uint64_t> steps = whole_steps(runs);
      EXPECT_TRUE(steps == std::vector<uint64_t>{1} || steps == (std::vector<uint64_t>{2, 1})) << call << " " << at;
      if (error.status != FSDP_OK) {
        EXPECT_EQ(error.status, FSDP_SYSTEM) << error.message;
        EXPECT_EQ(error.origin_code, code) << error.message;
        EXPECT_TRUE(has(error, runs)) << call << " " << at;
      } else {
        EXPECT_EQ(steps[0], 2u) << call << " " << at;
      }
      save(runs, 3, 3);  // the next one succeeds
      EXPECT_EQ(whole_steps(runs)[0], 3u);
    }
}

#ifndef __SANITIZE_THREAD__  // the process that dies has only one thread
TEST_P(Files, SurviveADeathAtEveryCall) {
  const int calls = calls_of_a_save(path + "/count");
  const std::string runs = path + "/runs";
  for (const Way way : {Way::kills_before, Way::kills_after})
    for (int at = 0; at < calls; ++at) {
      fs::remove_all(runs);
      save(runs, 1, 1);
      const pid_t child = ::fork();
      if (child == 0) {
        const FaultScope fault({way, at, 0, ""});
        save(runs, 2, 1 + static_cast<uint64_t>(at % 2), true);
        ::_exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 99) << at;
      const std::vector<uint64_t> steps = whole_steps(runs);
      EXPECT_TRUE(!steps.empty() && (steps.back() == 1 || steps[0] == 2)) << at;
      save(runs, 3, 3);
      EXPECT_EQ(whole_steps(runs)[0], 3u);
      for (const auto &entry : fs::directory_iterator(runs)) {
        const std::string name = entry.path().filename();
        // A replaced checkpoint has no owner, so it is removed after a day.
        const bool replaced = at % 2 == 0 && !fs::exists(entry.path() / owner_name);
        EXPECT_TRUE(name.starts_with("step-") || name.starts_with(".new-") || replaced) << name;
      }
    }
}
#endif

// ---- with its name from the start ----

void save_named(const std::string &path, uint64_t sequence, uint64_t step) { save(path, sequence, step, false, true); }

// Nothing is renamed, and the files that the manifest names are on the disk before the manifest.
TEST_P(Files, OfACheckpointWithANameGetTheirManifestLast) {
  save_named(path, 1, 1);
  std::vector<std::string> log;
  {
    const FaultScope all({});
    save_named(path, 2, 2);
    log = all.log();
  }
  EXPECT_EQ(std::ranges::count_if(log, [](const std::string &call) { return call.starts_with("rename"); }), 0);
  EXPECT_EQ(whole_steps(path), (std::vector<uint64_t>{2, 1}));
  EXPECT_FALSE(fs::exists(path + "/step-0000000002/owner"));
  const Error error = error_of([&] { save_named(path, 3, 2); });
  EXPECT_EQ(error.status, FSDP_INVALID_STATE);
  EXPECT_TRUE(has(error, path + "/step-0000000002: there is a checkpoint of that name already"));
  EXPECT_EQ(whole_steps(path), (std::vector<uint64_t>{2, 1}));
  Folder(path).remove_in_place(step_name(2));
  EXPECT_EQ(whole_steps(path), std::vector<uint64_t>{1});
  EXPECT_EQ(entries(path), 1u);
  // All data must be synced before the manifest.
  const auto last = std::find(log.rbegin(), log.rend(), "pwrite");
  const std::vector<std::string> before(log.begin(), last.base() - 1);
  EXPECT_GE(std::ranges::count(before, "fsync"), 4);
}

// Another job that looks into the folder during this finds either no owner file, or a locked one that names the owner.
TEST_P(Files, HaveNoOwnerThatHasNoLockYet) {
  if (!Fd(::open(path.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600)))
    GTEST_SKIP() << "this file system has no files without names: " << std::strerror(errno);
  const Folder folder = Folder::make(path);
  std::atomic<bool> made = false;
  int removed = 0, seen = 0;
  std::thread other([&] {
    for (; !made; ++seen) removed += !folder.remove_leftovers().empty();
  });
  int failed = 0;
  for (int i = 0; i < 1000; ++i) failed += error_of([&] { NewCheckpoint(folder, step_name(2)); }).status != FSDP_OK;
  made = true;
  other.join();
  EXPECT_EQ(removed, 0) << seen;
  EXPECT_EQ(failed, 0);
}

// Without its manifest the folder is no checkpoint. It is kept as long as its owner lives. Folders of other programs
// are always kept.
TEST_P(Files, OfALivingJobWithANameAreLeftAlone) {
  const Folder folder = Folder::make(path);
  save(path, 1, 1);
  ASSERT_EQ(::mkdir((path + "/step-0000000007").c_str(), 0700), 0);
  std::ofstream(path + "/step-0000000007/shard") << "somebody's";
  {
    const NewCheckpoint living(folder, step_name(2));
    const NewCheckpoint member(
        folder, living.id(), 10'000, [] {}, step_name(2));
    EXPECT_TRUE(folder.remove_leftovers().empty());
    std::vector<UnreadableCheckpoint> problems;
    EXPECT_EQ(folder.list(&problems).size(), 1u);
    EXPECT_EQ(problems.size(), 1u);  // the checkpoint of step 7
    EXPECT_EQ(error_of([&] { NewCheckpoint(folder, step_name(2)); }).status, FSDP_INVALID_STATE);
    EXPECT_TRUE(fs::exists(path + "/step-0000000002/owner"));
  }
  EXPECT_FALSE(fs::exists(path + "/step-0000000002"));
  EXPECT_EQ(folder.remove_leftovers(), std::vector<std::string>{});
  EXPECT_TRUE(fs::exists(path + "/step-0000000007/shard"));
}

int calls_of_a_named_save(const std::string &path) {
  save_named(path, 1, 1);
  const FaultScope count({});
  save_named(path, 2, 2);
  return count.calls();
}

TEST_P(Files, WithANameSurviveEveryFailedCall) {
  const int calls = calls_of_a_named_save(path + "/count");
  ASSERT_GT(calls, 20);
  const std::string runs = path + "/runs";
  for (int at = 0; at < calls; ++at) {
    fs::remove_all(runs);
    save_named(runs, 1, 1);
    Error error(FSDP_OK, "");
    std::string call;
    {
      const FaultScope fault({Way::fails, at, EIO, ""});
      error = error_of([&] { save_named(runs, 2, 2); });
      call = fault.what();
    }
    const std::vector<uint64_t> steps = whole_steps(runs);
    EXPECT_TRUE(steps == std::vector<uint64_t>{1} || steps == (std::vector<uint64_t>{2, 1})) << call << " " << at;
    EXPECT_TRUE(error.status != FSDP_OK || steps[0] == 2) << call << " " << at;
    save_named(runs, 3, 3);
    EXPECT_EQ(whole_steps(runs)[0], 3u);
  }
}

#ifndef __SANITIZE_THREAD__  // the process that dies has only one thread
// The removal of an older checkpoint is included. The next save removes the files of a dead job, at whatever call it
// died.
TEST_P(Files, WithANameSurviveADeathAtEveryCall) {
  const int calls = calls_of_a_named_save(path + "/count");
  const std::string runs = path + "/runs";
  for (const bool removes : {false, true})
    for (const Way way : {Way::kills_before, Way::kills_after})
      for (int at = 0; at < calls; ++at) {
        fs::remove_all(runs);
        save_named(runs, 1, 1);
        if (removes) save_named(runs, 2, 2);
        const pid_t child = ::fork();
        if (child == 0) {
          const FaultScope fault({way, at, 0, ""});
          if (removes)
            Folder(runs).remove_in_place(step_name(2));
          else
            save_named(runs, 2, 2);
          ::_exit(0);
        }
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status) && (WEXITSTATUS(status) == 99 || removes)) << at;
        const std::vector<uint64_t> steps = whole_steps(runs);
        EXPECT_TRUE(steps == std::vector<uint64_t>{1} || steps == (std::vector<uint64_t>{2, 1})) << at;
        const bool whole = steps.size() == 2;
        if (!whole) save_named(runs, 2, 2);  // its name is free
        save_named(runs, 3, 3);
        EXPECT_EQ(whole_steps(runs), (std::vector<uint64_t>{3, 2, 1})) << at;
        EXPECT_EQ(entries(runs), 3u) << at;
        if (removes && WEXITSTATUS(status) == 0) break;  // it has fewer calls
      }
}
#endif

}  // namespace
}  // namespace fsdp::checkpoint
