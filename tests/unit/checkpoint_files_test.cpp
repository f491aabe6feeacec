// SPDX-License-Identifier: Apache-2.0
// Files and folders of checkpoints on real file systems, and with every one of their system calls failing or being the
// process's last.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "base/error.h"
#include "checkpoint/files/aligned_bytes.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/files/folder_tree.h"
#include "checkpoint/files/in_file.h"
#include "checkpoint/files/out_file.h"
#include "checkpoint/files/owner.h"
#include "system_faults.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using test::FaultScope;
using test::SystemFault;
using Way = SystemFault::Way;

// A folder of this test's, on the disk or in memory: where tmpfs has no direct I/O, the other way is taken.
class Files : public testing::TestWithParam<const char *> {
 protected:
  Files() {
    std::string name = std::string(GetParam()) + "/checkpoint-files-XXXXXX";
    path = ::mkdtemp(name.data());
    folder = Fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  ~Files() override { fs::remove_all(path); }

  std::string text_of(const std::string &name) const {
    std::ifstream file(path + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put(const std::string &name, const std::string &text) const { std::ofstream(path + "/" + name) << text; }

  std::string path;
  Fd folder;
};

INSTANTIATE_TEST_SUITE_P(On, Files, testing::Values("/var/tmp", "/dev/shm"),
                         [](const auto &info) { return std::string(info.index ? "Memory" : "Disk"); });

template <class Body>
Error error_of(Body body) {
  try {
    body();
  } catch (const Error &error) {
    return error;
  }
  return Error(FSDP_OK, "no error");
}

bool has(const Error &error, const std::string &text) {
  if (error.message.find(text) != std::string::npos) return true;
  std::printf("# '%s' lacks '%s'\n", error.message.c_str(), text.c_str());
  return false;
}

std::string random_text(size_t size) {
  std::minstd_rand random(static_cast<uint32_t>(size));
  std::string text(size, '\0');
  for (char &c : text) c = static_cast<char>(random() >> 8);
  return text;
}

void write_file(int folder, const std::string &name, const std::string &shown, const std::string &text) {
  const AlignedBytes buffer(text.size());
  std::memcpy(buffer.bytes().data(), text.data(), text.size());
  OutFile file(folder, name, shown);
  file.write(0, buffer.bytes());
  file.finish(text.size());
}

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

TEST_P(Files, AreNewOnes) {
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

// A pipe without a writer would hold an ordinary open up for ever.
TEST_P(Files, AreNothingElse) {
  ASSERT_EQ(::mkfifo((path + "/pipe").c_str(), 0600), 0);
  ASSERT_EQ(::mkdir((path + "/folder").c_str(), 0700), 0);
  put("there", "x");
  ASSERT_EQ(::symlink("there", (path + "/link").c_str()), 0);
  EXPECT_TRUE(has(error_of([&] { InFile(folder.get(), "pipe", "a/pipe"); }), "a/pipe: is no regular file"));
  EXPECT_TRUE(has(error_of([&] { InFile(folder.get(), "folder", "a/folder"); }), "a/folder: "));
  EXPECT_TRUE(has(error_of([&] { InFile(folder.get(), "link", "a/link"); }), "a/link: cannot be opened: "));
  EXPECT_TRUE(has(error_of([&] { InFile(folder.get(), "none", "a/none"); }), "a/none: cannot be opened: No such file"));
}

TEST_P(Files, CutOffWhileTheyAreReadAreToldSo) {
  put("f", random_text(20'000));
  const InFile file(folder.get(), "f", "a/file");
  fs::resize_file(path + "/f", 9000);
  const AlignedBytes buffer(20'480);
  EXPECT_TRUE(
      has(error_of([&] { file.read(0, 20'000, buffer.bytes()); }), "a/file: ends after 9000 bytes, and had 20000"));
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

// ---- folders ----

Manifest manifest_of(uint64_t sequence, uint64_t step) {
  Manifest manifest;
  manifest.sequence = sequence;
  manifest.step = step;
  return manifest;
}

// A checkpoint of two files, one of them in a folder.
void save(const std::string &path, uint64_t sequence, uint64_t step, bool replace = false, bool named = false) {
  const Folder folder = Folder::make(path);
  folder.remove_leftovers();
  NewCheckpoint checkpoint(folder, named ? step_name(step) : "");
  write_file(checkpoint.fd(), "shard", checkpoint.shown("shard"), random_text(9000 + step));
  const Fd inside = checkpoint.make_folder("optimizer");
  write_file(inside.get(), "shard", checkpoint.shown("optimizer/shard"), random_text(5000 + step));
  checkpoint.commit(step_name(step), write_manifest(manifest_of(sequence, step)), replace);
}

// What must hold whenever somebody looks: each checkpoint that has a name is whole.
std::vector<uint64_t> whole_steps(const std::string &path) {
  std::vector<UnreadableCheckpoint> problems;
  std::vector<uint64_t> steps;
  for (const FolderEntry &entry : Folder(path).list(&problems)) {
    const uint64_t step = entry.manifest.step;
    EXPECT_EQ(entry.name, step_name(step));
    const auto text = [&](const std::string &name) {
      std::ifstream file(path + "/" + entry.name + "/" + name, std::ios::binary);
      return std::string{std::istreambuf_iterator<char>(file), {}};
    };
    EXPECT_EQ(text("shard"), random_text(9000 + step));
    EXPECT_EQ(text("optimizer/shard"), random_text(5000 + step));
    steps.push_back(step);
  }
  EXPECT_TRUE(problems.empty()) << problems[0].why.message;
  return steps;
}

size_t entries(const std::string &path) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(path), fs::directory_iterator{}));
}

TEST_P(Files, OfAFolderAreListedTheNewestFirst) {
  const std::string runs = path + "/not/yet/there";
  save(runs, 1, 30);
  save(runs, 2, 10);  // went back to an earlier step
  save(runs, 3, 20);
  EXPECT_EQ(whole_steps(runs), (std::vector<uint64_t>{20, 10, 30}));
  EXPECT_EQ(entries(runs), 3u);
  std::ofstream(runs + "/step-0000000020/checkpoint.json") << "{";
  fs::remove(runs + "/step-0000000010/checkpoint.json");
  std::vector<UnreadableCheckpoint> problems;
  EXPECT_EQ(Folder(runs).list(&problems).size(), 1u);
  EXPECT_EQ(problems.size(), 2u);
}

// What can become of a manifest, or of the calls that read it, and a word of why it cannot be read then.
struct UnreadableManifest {
  const char *name, *word;
  void (*damage)(const std::string &manifest);
  SystemFault fault = {};  // of the first checkpoint's manifest, by the number of the call
};

void flip(const std::string &file, const std::string &before, char to) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  const size_t at = text.find(before);
  ASSERT_NE(at, std::string::npos);
  stream.clear();
  stream.seekp(static_cast<std::streamoff>(at + before.size())).put(to);
}

const UnreadableManifest unreadable_manifests[] = {
    {"version", "not the sum of what stands before it",
     [](const std::string &manifest) { flip(manifest, "\"version\":", '0'); }},
    {"sequence", "not the sum", [](const std::string &manifest) { flip(manifest, "\"step\":", '9'); }},
    {"format", "/format is", [](const std::string &manifest) { flip(manifest, "libfsdp", '?'); }},
    {"cut", "its JSON ends", [](const std::string &manifest) { fs::resize_file(manifest, 9); }},
    {"empty", "its JSON ends", [](const std::string &manifest) { fs::resize_file(manifest, 0); }},
    {"lost", "No such file", [](const std::string &manifest) { fs::remove(manifest); }},
    {"pipe", "is no regular file",
     [](const std::string &manifest) {
       fs::remove(manifest);
       ASSERT_EQ(::mkfifo(manifest.c_str(), 0600), 0);
     }},
    {"folder", "is no regular file",
     [](const std::string &manifest) {
       fs::remove(manifest);
       fs::create_directory(manifest);
     }},
    {"link", "cannot be opened",
     [](const std::string &manifest) {
       fs::rename(manifest, manifest + ".moved");
       fs::create_symlink(manifest + ".moved", manifest);
     }},
    {"EIO", "Input/output error", nullptr, {Way::fails, 0, EIO, "pread"}},
    {"EACCES", "Permission denied", nullptr, {Way::fails, 2, EACCES, "openat"}},
    {"EACCES_folder", "cannot be opened as a folder: Permission denied", nullptr, {Way::fails, 1, EACCES, "openat"}}};

// The others are listed, and it is told whether the one may be the newest: by its sequence if that can be seen, else by
// its step, and by the time of its files.
TEST_P(Files, WithAManifestThatCannotBeReadLeaveTheOthers) {
  for (const UnreadableManifest &one : unreadable_manifests)
    for (const uint64_t damaged : {10, 20, 30}) {
      if (!one.damage && damaged != 10) continue;
      fs::remove_all(path + "/runs");
      for (const uint64_t step : {10, 20, 30}) {
        save(path + "/runs", step / 10, step);
        std::ofstream(path + "/runs/" + step_name(step) + "/shard-1.safetensors") << "x";
      }
      const std::string file = path + "/runs/" + step_name(damaged) + "/" + manifest_name;
      if (one.damage) one.damage(file);
      std::vector<UnreadableCheckpoint> unreadable;
      const Folder folder(path + "/runs");
      std::vector<FolderEntry> entries;
      {
        const FaultScope fault(one.fault);
        entries = folder.list(&unreadable);
        EXPECT_EQ(fault.happened(), !one.damage) << one.name;
      }
      EXPECT_EQ(entries.size(), 2u) << one.name;
      ASSERT_EQ(unreadable.size(), 1u) << one.name;
      EXPECT_EQ(unreadable[0].name, step_name(damaged));
      EXPECT_EQ(unreadable[0].newer, (30 - damaged) / 10) << one.name << " of step " << damaged;
      EXPECT_TRUE(has(unreadable[0].why, one.word)) << one.name;
      EXPECT_TRUE(has(unreadable[0].why, step_name(damaged))) << one.name;
      const bool is_newest = damaged == 30;
      EXPECT_EQ(error_of([&] { require_newest_is_known("runs", unreadable); }).status,
                is_newest ? unreadable[0].why.status : FSDP_OK)
          << one.name;
      const uint64_t next = folder.next_sequence();
      EXPECT_EQ(next, is_newest ? 2 + (uint64_t{1} << 20) : 4) << one.name;
      save(path + "/runs", next, 40);
      EXPECT_EQ(folder.list().at(0).name, step_name(40));
    }
}

// A job that went back to an earlier step: the newest has a lower one. Its sequence tells, and so do times.
TEST_P(Files, OfALowerStepMayBeTheNewestAllTheSame) {
  save(path, 1, 30);
  save(path, 2, 10);
  const auto put_shard = [&](uint64_t step, int64_t seconds) {
    const std::string file = path + "/" + step_name(step) + "/shard-1.safetensors";
    std::ofstream(file) << "x";
    fs::last_write_time(file, fs::file_time_type::clock::now() + std::chrono::seconds(seconds));
  };
  put_shard(30, -100);
  put_shard(10, -50);
  const auto newer_than = [&](uint64_t step) {
    const std::string file = path + "/" + step_name(step) + "/" + manifest_name, kept = path + "/kept";
    size_t newer = 0;
    for (const bool is_lost : {false, true}) {
      fs::copy_file(file, kept, fs::copy_options::overwrite_existing);
      is_lost ? static_cast<void>(fs::remove(file)) : flip(file, "\"version\":", '3');
      std::vector<UnreadableCheckpoint> unreadable;
      Folder(path).list(&unreadable);
      newer = newer * 10 + unreadable.at(0).newer;
      fs::copy_file(kept, file, fs::copy_options::overwrite_existing);
    }
    return newer;
  };
  EXPECT_EQ(newer_than(10), 0u);
  EXPECT_EQ(newer_than(30), 10u);  // with its sequence told it is older; without, its step says otherwise
}

// It is whole or damaged, whatever owner is in it: not to be removed, and not passed over in silence.
TEST_P(Files, OfACheckpointThatItsOwnerIsStillInAreNotRemoved) {
  save(path, 1, 5, false, true);
  const std::string inside = path + "/" + step_name(5) + "/";
  std::ofstream(inside + owner_name) << named_owner(make_id());
  const Folder folder(path);
  std::vector<UnreadableCheckpoint> unreadable;
  EXPECT_EQ(folder.list(&unreadable).size(), 1u);
  flip(inside + manifest_name, "\"version\":", '5');
  EXPECT_TRUE(folder.list(&unreadable).empty());
  ASSERT_EQ(unreadable.size(), 1u);
  EXPECT_TRUE(folder.remove_leftovers().empty());
  fs::resize_file(inside + manifest_name, 40);  // as a job leaves it that dies while it writes it
  unreadable.clear();
  EXPECT_TRUE(folder.list(&unreadable).empty() && unreadable.empty());
  EXPECT_EQ(folder.remove_leftovers(), std::vector<std::string>{step_name(5)});
}

// Not what the last call on the way says, which finds nothing there.
TEST_P(Files, OfAFolderThatMayNotBeMadeSayWhy) {
  const FaultScope fault({Way::fails, -1, EACCES, "mkdirat"});
  const Error error = error_of([&] { Folder::make(path + "/a/b"); });
  EXPECT_EQ(error.status, FSDP_SYSTEM);
  EXPECT_EQ(error.origin_code, EACCES);
  EXPECT_TRUE(has(error, path + "/a: making the folder: Permission denied"));
  EXPECT_EQ(error_of([&] { Folder::make(path); }).status, FSDP_OK);  // it is there
}

TEST_P(Files, BehindLinksAreReadOnRequest) {
  put("there", "x");
  ASSERT_EQ(::symlink("there", (path + "/link").c_str()), 0);
  EXPECT_EQ(InFile(folder.get(), "link", "a/link", LinkPolicy::followed).bytes(), 1u);
  ASSERT_EQ(::symlink("nowhere", (path + "/loose").c_str()), 0);
  const Error error = error_of([&] { InFile(folder.get(), "loose", "a/loose", LinkPolicy::followed); });
  EXPECT_TRUE(has(error, "a/loose: cannot be opened: No such file"));
}

TEST_P(Files, OfACheckpointThatIsThereAreReplacedOnlyOnRequest) {
  save(path, 1, 5);
  const Error error = error_of([&] { save(path, 2, 5); });
  EXPECT_EQ(error.status, FSDP_INVALID_STATE);
  EXPECT_TRUE(has(error, path + "/step-0000000005: there is a checkpoint of that name already"));
  EXPECT_EQ(Folder(path).list().at(0).manifest.sequence, 1u);
  EXPECT_EQ(entries(path), 1u);
  save(path, 2, 5, true);
  EXPECT_EQ(Folder(path).list().at(0).manifest.sequence, 2u);
  EXPECT_EQ(whole_steps(path), std::vector<uint64_t>{5});
  EXPECT_EQ(entries(path), 1u);
}

TEST_P(Files, OfAFolderThatIsNotSharedAreNotSeen) {
  const Folder here = Folder::make(path + "/here"), there = Folder::make(path + "/there");
  const NewCheckpoint first(here);
  EXPECT_EQ(NewCheckpoint(here, first.id(), 10'000, [] {}).shown("f"), first.shown("f"));
  const Error error = error_of([&] { NewCheckpoint(there, first.id(), 50, [] {}); });
  EXPECT_TRUE(has(error, path + "/there: the folder is not shared: this host does not see .tmp-" + first.id()));
}

// Whoever waits for another host can be told to stop.
TEST_P(Files, OfAnotherHostAreAwaitedAsLongAsTheCallerLikes) {
  const Folder there = Folder::make(path + "/there");
  const Error error = error_of([&] {
    NewCheckpoint(there, "0123456789abcdef0123456789abcdef", 60'000, [] { fail(FSDP_INTERRUPTED, "enough"); });
  });
  EXPECT_EQ(error.status, FSDP_INTERRUPTED);
}

TEST_P(Files, OfAnotherLivingJobAreLeftAlone) {
  const Folder folder = Folder::make(path);
  const NewCheckpoint living(folder);
  const NewCheckpoint member(folder, living.id(), 10'000, [] {});
  EXPECT_TRUE(folder.remove_leftovers().empty());
  // A folder of ours without an owner goes after a day; somebody else's stays.
  const std::string ours = ".tmp-0123456789abcdef0123456789abcdef", others = ".tmp-backup";
  for (const std::string &name : {ours, others}) ASSERT_EQ(::mkdir((path + "/" + name).c_str(), 0700), 0);
  EXPECT_TRUE(folder.remove_leftovers().empty());
  const timespec old[2] = {{::time(nullptr) - 100'000, 0}, {::time(nullptr) - 100'000, 0}};
  for (const std::string &name : {ours, others})
    ASSERT_EQ(::utimensat(AT_FDCWD, (path + "/" + name).c_str(), old, 0), 0);
  EXPECT_EQ(folder.remove_leftovers(), std::vector<std::string>{ours});
  EXPECT_EQ(entries(path), 2u);
}

TEST_P(Files, OfACheckpointAreRemovedWithItsNameFirst) {
  save(path, 1, 1);
  save(path, 2, 2);
  Folder(path).remove(step_name(1));
  EXPECT_EQ(whole_steps(path), std::vector<uint64_t>{2});
  EXPECT_EQ(entries(path), 1u);
  EXPECT_TRUE(has(error_of([&] { Folder(path).remove(step_name(1)); }), "step-0000000001: removing it: No such file"));
  EXPECT_EQ(entries(path), 1u);
}

// A link inside leads nowhere: what it names stays.
TEST_P(Files, BehindLinksAreNotRemoved) {
  fs::create_directories(path + "/outside/inner");
  put("outside/inner/kept", "x");
  fs::create_directory(path + "/tree");
  fs::create_symlink(path + "/outside", path + "/tree/link");
  remove_tree(folder.get(), "tree", "tree");
  EXPECT_FALSE(fs::exists(path + "/tree"));
  EXPECT_EQ(text_of("outside/inner/kept"), "x");
}

// ---- the order of what reaches the disk ----

// All that a checkpoint consists of is on the disk before it has its name, and the name is before the caller is told.
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
  // Two files of data, the manifest; the folder inside, the checkpoint's own.
  EXPECT_EQ(std::ranges::count(before, "fsync"), 5);
  const auto last_write = std::ranges::find(before.rbegin(), before.rend(), "pwrite");
  const auto last_sync = std::ranges::find(before.rbegin(), before.rend(), "fsync");
  EXPECT_LT(last_sync - before.rbegin(), last_write - before.rbegin());
  EXPECT_EQ(std::ranges::count(after, "fsync"), 1);
  EXPECT_EQ(std::ranges::count(after, "pwrite"), 0);
}

// A disk that cannot keep what was written: whichever it says so of, nothing gets the name; but of the name itself.
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

// Into a folder that is there.
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
      // Each call fails in one way; in all of them where there is time.
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

#ifndef __SANITIZE_THREAD__  // a process dies, and of one thread
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
        // What was replaced has no owner: it goes after a day.
        const bool replaced = at % 2 == 0 && !fs::exists(entry.path() / owner_name);
        EXPECT_TRUE(name.starts_with("step-") || name.starts_with(".new-") || replaced) << name;
      }
    }
}
#endif

// ---- with its name from the start ----

void save_named(const std::string &path, uint64_t sequence, uint64_t step) { save(path, sequence, step, false, true); }

// Nothing is renamed, and what the manifest speaks of is on the disk before there is a manifest.
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
  // All of the data before the manifest.
  const auto last = std::find(log.rbegin(), log.rend(), "pwrite");
  const std::vector<std::string> before(log.begin(), last.base() - 1);
  EXPECT_GE(std::ranges::count(before, "fsync"), 4);
}

// Another job that looks into the folder meanwhile finds no owner, or one that is locked and says whose it is.
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

// Without its manifest it is nothing, and left alone as long as its owner lives; other folders always are.
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
    EXPECT_EQ(problems.size(), 1u);  // of step 7
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

#ifndef __SANITIZE_THREAD__  // a process dies, and of one thread
// Also of the removal of an older one. What a dead job has left the next save removes, whatever it was at.
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
