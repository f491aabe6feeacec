// SPDX-License-Identifier: Apache-2.0
// A folder of checkpoints. What is being written lies in `.tmp-ID`, whose owner holds a lock as long as it lives; it
// gets its name, and is one of the folder's checkpoints, at once and when it is whole. Where folders cannot be renamed,
// as on mounts of object stores, it has its name from the start: its manifest makes it a checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "checkpoint/format/manifest.h"

namespace fsdp::checkpoint {

// What is in folders, by their descriptors: no link is followed, and no other folder of that name is met.

// Names in an open folder, in their order. All of these throw SYSTEM with the path, `shown`, and errno.
std::vector<std::string> list_folder(int folder, const std::string &shown);
// The folder that a name with folders in it leads to, and the name in that.
std::pair<Fd, std::string> find_file(int folder, const std::string &name, const std::string &shown);
Fd open_folder(int parent, const std::string &name, const std::string &shown);
// A folder with all that is in it; what is gone already is no failure.
void remove_tree(int parent, const std::string &name, const std::string &shown);
// Returns when names that were given or taken away in it are on the disk.
void sync_folder(int folder, const std::string &shown);
// ... and of the folders in it.
void sync_tree(int folder, const std::string &shown);

struct FolderEntry {
  std::string name;  // step-0000001200
  Manifest manifest;
};

// One that has its name, and whose manifest cannot be read.
struct UnreadableCheckpoint {
  std::string name;
  Error why;
  size_t newer = 0;  // so many of those that can be read, the newest ones, have certainly been saved after it

  bool may_be_newest() const { return newer == 0; }
};

class Folder {
 public:
  // Made if it is not there, and so are those above it. All of these throw SYSTEM with the path, the deed and errno.
  static Folder make(const std::string &path);
  explicit Folder(std::string path);

  const std::string &path() const { return path_; }
  int fd() const { return fd_.get(); }
  std::string shown(const std::string &name) const { return path_ + "/" + name; }

  // Those with a valid manifest, the newest first. Others are added to `unreadable`, if that is given, but those that
  // are still written, or were not written to their end. Throws only what is wrong with the folder or the process.
  std::vector<FolderEntry> list(std::vector<UnreadableCheckpoint> *unreadable = nullptr) const;
  // Higher than that of any checkpoint here, also of those that cannot be read.
  uint64_t next_sequence() const;
  // Of the checkpoint of that name: throws what is wrong with it. Its text's long_sum_of goes to `sum`, if given.
  Manifest read_manifest(const std::string &name, std::string *sum = nullptr) const;
  // Is anything there under that name?
  bool has(const std::string &name) const;
  // Is it one without a manifest yet, whose job writes it or has died at it?
  bool is_unfinished(const std::string &name) const;
  // What jobs that no longer live were writing is removed. Returns the names.
  std::vector<std::string> remove_leftovers() const;
  // With all that is in it, through `.tmp-ID`: never half of it under its name.
  void remove(const std::string &name) const;
  // ... without a rename: first the manifest, without which the rest is nothing, and which the next save removes.
  void remove_in_place(const std::string &name) const;

 private:
  bool is_leftover(const std::string &name) const;
  std::string read_manifest_text(const std::string &name) const;
  size_t count_newer(const std::string &name, const std::vector<FolderEntry> &entries) const;
  std::optional<uint64_t> told_sequence(const std::string &name) const;
  std::optional<int64_t> written_at(const std::string &name) const;

  std::string path_;
  Fd fd_;
};

// A checkpoint on its way. Until commit() it has no name; without one it is removed.
class NewCheckpoint {
 public:
  // By one rank, which lives as long as it is written: it alone commits. name: the checkpoint's from the start on;
  // INVALID_STATE where something has it.
  explicit NewCheckpoint(const Folder &folder, const std::string &name = "");
  // By the others: must see within `patience_ms` what the first one made, or the folder is not shared. `poll` is called
  // while it waits, and throws what ends the wait.
  NewCheckpoint(const Folder &folder, const std::string &id, uint32_t patience_ms, const std::function<void()> &poll,
                const std::string &name = "");
  ~NewCheckpoint();
  NewCheckpoint(const NewCheckpoint &) = delete;
  NewCheckpoint &operator=(const NewCheckpoint &) = delete;

  // What it is called as long as it is written.
  std::string written_name() const { return name_.empty() ? ".tmp-" + id_ : name_; }
  const std::string &id() const { return id_; }
  int fd() const { return fd_.get(); }
  std::string shown(const std::string &name) const { return folder_.shown(written_name()) + "/" + name; }
  // A folder inside, open, which may be in another one there; made if it is not there. Without a name this one.
  Fd make_folder(const std::string &name) const;
  // All files are on the disk: so is the manifest now, and the checkpoint has its name. What had that name before is
  // gone with `replace`; without, INVALID_STATE. UNSUPPORTED where the file system cannot exchange two names.
  void commit(const std::string &name, const std::string &manifest, bool replace);
  // The same of a folder that has no manifest, nor a name from the start on.
  void commit(const std::string &name, bool replace);
  // A small file in it.
  void put(const std::string &name, const std::string &text) const;

 private:
  void make_unnamed();
  void make_named();
  void write_manifest_last(const std::string &manifest);
  void leave(const std::string &name);
  void clear(const std::string &name) const noexcept;
  void give_name(const std::string &name, bool replace);
  void exchange_names(const std::string &from, const std::string &name);

  const Folder &folder_;
  std::string id_, name_;  // the name: if it has it from the start on
  Fd fd_, owner_;
  bool owns_ = false;
};

// The newest is wanted: throws where one that cannot be read may be it, with its status, and names it. way_out: what
// else can be done, for people.
void require_newest_is_known(const std::string &path, const std::vector<UnreadableCheckpoint> &unreadable,
                             std::string_view way_out = "");

// step-0000001200
std::string step_name(uint64_t step);
bool is_checkpoint_name(const std::string &name);

}  // namespace fsdp::checkpoint
