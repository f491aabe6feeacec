// SPDX-License-Identifier: Apache-2.0
// Tests folders of checkpoints on a disk and in memory: which checkpoints are listed or cannot be read, which job owns
// them, and which are removed.
#include "checkpoint_folders.h"

namespace fsdp::checkpoint {
namespace {

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

// Names a way in which a manifest or a call that reads it fails, and a word of the error text.
struct UnreadableManifest {
  const char *name, *word;
  void (*damage)(const std::string &manifest);
  // The call that fails, counted for the first checkpoint's manifest.
  SystemFault fault = {};
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
    {"lost", "is missing; the checkpoint is damaged", [](const std::string &manifest) { fs::remove(manifest); }},
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
    {"link", "is a symbolic link",
     [](const std::string &manifest) {
       fs::rename(manifest, manifest + ".moved");
       fs::create_symlink(manifest + ".moved", manifest);
     }},
    {"EIO", "Input/output error", nullptr, {Way::fails, 0, EIO, "pread"}},
    {"EACCES", "Permission denied", nullptr, {Way::fails, 2, EACCES, "openat"}},
    {"EACCES_folder", "cannot be opened as a folder: Permission denied", nullptr, {Way::fails, 1, EACCES, "openat"}}};

// The other checkpoints are listed. The list also tells whether the unreadable one may be the newest: by its sequence
// if that can be read, otherwise by its step and the time of its files.
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
      const Error refusal = error_of([&] { require_newest_is_known("runs", unreadable); });
      EXPECT_EQ(refusal.status, is_newest ? unreadable[0].why.status : FSDP_OK) << one.name;
      EXPECT_NE(refusal.origin_code, ENOENT) << one.name << ": there is a folder of checkpoints";
      const bool forbidden = std::string(one.name).starts_with("EACCES");
      EXPECT_EQ(has(refusal, forbidden ? "; let this process read it" : "; remove it"), is_newest) << one.name;
      const uint64_t next = folder.next_sequence();
      EXPECT_EQ(next, is_newest ? 2 + (uint64_t{1} << 20) : 4) << one.name;
      save(path + "/runs", next, 40);
      EXPECT_EQ(folder.list().at(0).name, step_name(40));
    }
}

// For a while, neither the newest checkpoint nor those saved after it can be read.
TEST_P(Files, GetHigherSequencesThanAllThatCannotBeRead) {
  const Folder folder = Folder::make(path);
  for (const uint64_t step : {10, 20, 30, 40}) {
    save(path, folder.next_sequence(), step);
    if (step > 10) flip(path + "/" + step_name(step) + "/" + manifest_name, "libfsd", '?');
  }
  save(path, folder.next_sequence(), 5);
  for (const uint64_t step : {20, 30, 40}) flip(path + "/" + step_name(step) + "/" + manifest_name, "libfsd", 'p');
  std::vector<std::string> newest_first;
  for (const FolderEntry &entry : folder.list()) newest_first.push_back(entry.name);
  EXPECT_EQ(newest_first,
            (std::vector<std::string>{step_name(5), step_name(40), step_name(30), step_name(20), step_name(10)}));
}

// A job went back to an earlier step, so the newest checkpoint has a lower step. Its sequence shows that it is the
// newest, and so do the times.
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
  EXPECT_EQ(newer_than(30), 10u);  // its sequence shows that it is older; without the sequence its step says otherwise
}

// The checkpoint is whole or damaged, whatever owner file it contains. So it is not removed, and it is listed.
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
  fs::resize_file(inside + manifest_name, 40);  // a job that dies while it writes leaves this
  unreadable.clear();
  EXPECT_TRUE(folder.list(&unreadable).empty() && unreadable.empty());
  EXPECT_EQ(folder.remove_leftovers(), std::vector<std::string>{step_name(5)});
}

// The error is that of the call that fails first, not that of the last call, which finds no folder.
TEST_P(Files, OfAFolderThatMayNotBeMadeSayWhy) {
  const FaultScope fault({Way::fails, -1, EACCES, "mkdirat"});
  const Error error = error_of([&] { Folder::make(path + "/a/b"); });
  EXPECT_EQ(error.status, FSDP_SYSTEM);
  EXPECT_EQ(error.origin_code, EACCES);
  EXPECT_TRUE(has(error, path + "/a: making the folder: Permission denied"));
  EXPECT_EQ(error_of([&] { Folder::make(path); }).status, FSDP_OK);  // the folder exists
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

// A rank that waits for another host can be told to stop.
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
  // A folder of the library without an owner is removed after a day. A folder of another program stays.
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

// A link inside a folder is not followed: its target stays.
TEST_P(Files, BehindLinksAreNotRemoved) {
  fs::create_directories(path + "/outside/inner");
  put("outside/inner/kept", "x");
  fs::create_directory(path + "/tree");
  fs::create_symlink(path + "/outside", path + "/tree/link");
  remove_tree(folder.get(), "tree", "tree");
  EXPECT_FALSE(fs::exists(path + "/tree"));
  EXPECT_EQ(text_of("outside/inner/kept"), "x");
}

}  // namespace
}  // namespace fsdp::checkpoint
