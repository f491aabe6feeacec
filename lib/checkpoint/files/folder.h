// SPDX-License-Identifier: Apache-2.0
// A folder of checkpoints. A checkpoint that is being written lies in `.tmp-ID`, whose owner holds a lock while it
// lives. When it is whole it gets its name at once, and is then one of the folder's checkpoints. If folders cannot be
// renamed, as on mounts of object stores, it has its name from the start, and its manifest makes it a checkpoint.
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

// Access to folders by their descriptors: no link is followed, and a folder cannot be exchanged for another of that
// name. Returns the sorted names in an open folder. All functions throw SYSTEM with the path `shown` and errno.
std::vector<std::string> list_folder(int folder, const std::string &shown);
// Follows the folders in a name; returns the last folder and the name in it.
std::pair<Fd, std::string> find_file(int folder, const std::string &name, const std::string &shown);
Fd open_folder(int parent, const std::string &name, const std::string &shown);
// Removes a folder with its contents. Entries that are gone already are no failure.
void remove_tree(int parent, const std::string &name, const std::string &shown);
// Returns when names that were added or removed in the folder are on the disk.
void sync_folder(int folder, const std::string &shown);
// The same for the folder and all folders in it.
void sync_tree(int folder, const std::string &shown);

struct FolderEntry {
  std::string name;  // step-0000001200
  Manifest manifest;
};

// A checkpoint that has its name, but whose manifest cannot be read.
struct UnreadableCheckpoint {
  std::string name;
  Error why;
  size_t newer = 0;  // number of readable checkpoints that were certainly saved later; they are the newest ones

  bool may_be_newest() const { return newer == 0; }
};

class Folder {
 public:
  // Makes the folder if it does not exist, and the folders above it. All functions throw SYSTEM with the path, the
  // action and errno.
  static Folder make(const std::string &path);
  explicit Folder(std::string path);

  const std::string &path() const { return path_; }
  int fd() const { return fd_.get(); }
  std::string shown(const std::string &name) const { return path_ + "/" + name; }

  // Returns the checkpoints with a valid manifest, the newest first. Others are added to `unreadable`, if that is
  // given, except those that are still being written or were not written to their end. Throws only errors of the folder
  // or the process.
  std::vector<FolderEntry> list(std::vector<UnreadableCheckpoint> *unreadable = nullptr) const;
  // A sequence number higher than that of any checkpoint here, including those that cannot be read.
  uint64_t next_sequence() const;
  // Reads the manifest of a checkpoint; throws if it is damaged. The text's long_sum_of goes to `sum`, if that is
  // given.
  Manifest read_manifest(const std::string &name, std::string *sum = nullptr) const;
  // Does anything exist under that name?
  bool has(const std::string &name) const;
  // Is it a checkpoint without a manifest, whose job is writing it or has died meanwhile?
  bool is_unfinished(const std::string &name) const;
  // Removes what jobs that no longer live were writing. Returns the names.
  std::vector<std::string> remove_leftovers() const;
  // Removes a checkpoint with its contents. It is first renamed to `.tmp-ID`, so that no half of it has its name.
  void remove(const std::string &name) const;
  // The same without a rename: the manifest is removed first. Without it the rest is no checkpoint, and the next save
  // removes it.
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

// A checkpoint that is being written. It has no name until commit(); if it is not committed, it is removed.
class NewCheckpoint {
 public:
  // For one rank, which lives while the checkpoint is written and alone commits it. `name` is given if the checkpoint
  // has its name from the start; throws INVALID_STATE if the name is taken.
  explicit NewCheckpoint(const Folder &folder, const std::string &name = "");
  // For the other ranks: waits until it sees the folder that the first rank made. If it does not within `patience_ms`,
  // the folder is not shared. `poll` is called during the wait, and throws to end it.
  NewCheckpoint(const Folder &folder, const std::string &id, uint32_t patience_ms, const std::function<void()> &poll,
                const std::string &name = "");
  ~NewCheckpoint();
  NewCheckpoint(const NewCheckpoint &) = delete;
  NewCheckpoint &operator=(const NewCheckpoint &) = delete;

  // The folder's name while the checkpoint is written.
  std::string written_name() const { return name_.empty() ? ".tmp-" + id_ : name_; }
  const std::string &id() const { return id_; }
  int fd() const { return fd_.get(); }
  std::string shown(const std::string &name) const { return folder_.shown(written_name()) + "/" + name; }
  // Opens a folder inside, and makes it if it does not exist. The name may have several folders; without a name it is
  // this folder.
  Fd make_folder(const std::string &name) const;
  // Called when all files are on the disk: writes the manifest to the disk and gives the checkpoint its name. With
  // `replace` an older checkpoint of that name is removed; without, throws INVALID_STATE. Throws UNSUPPORTED if the
  // file system cannot exchange two names.
  void commit(const std::string &name, const std::string &manifest, bool replace);
  // The same for a folder without a manifest and without a name from the start.
  void commit(const std::string &name, bool replace);
  // Writes a small file in the folder.
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
  std::string id_, name_;  // name_ is set if the checkpoint has its name from the start
  Fd fd_, owner_;
  bool owns_ = false;
};

// Called if the newest checkpoint is wanted. If an unreadable checkpoint may be the newest, throws its error and names
// it. `way_out` tells people what else they can do.
void require_newest_is_known(const std::string &path, const std::vector<UnreadableCheckpoint> &unreadable,
                             std::string_view way_out = "");

// Returns "step-0000001200" for step 1200.
std::string step_name(uint64_t step);
bool is_checkpoint_name(const std::string &name);

}  // namespace fsdp::checkpoint
