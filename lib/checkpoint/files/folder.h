// SPDX-License-Identifier: Apache-2.0
// A folder of checkpoints. A checkpoint that is being written is in `.tmp-ID`, whose owner holds a lock while it lives.
// When it is complete, it gets its name in one step, and is then one of the folder's checkpoints. If folders cannot be
// renamed, as on mounts of object stores, the checkpoint has its name from the start, and is a checkpoint once it has
// its manifest.
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

// Folders are accessed by their descriptors, so no link is followed, and no folder can be replaced by another one with
// its name. Returns the sorted names in an open folder. All functions throw SYSTEM with the path `shown` and errno.
std::vector<std::string> list_folder(int folder, const std::string &shown);
// Opens the folders in a path one after the other; returns the last folder and the name in it.
std::pair<Fd, std::string> find_file(int folder, const std::string &name, const std::string &shown);
Fd open_folder(int parent, const std::string &name, const std::string &shown);
// Removes a folder with its contents. Entries that do not exist any more are no failure.
void remove_tree(int parent, const std::string &name, const std::string &shown);
// Returns when the disk has all changes of names in the folder.
void sync_folder(int folder, const std::string &shown);
// Does the same for the folder and all folders in it.
void sync_tree(int folder, const std::string &shown);

struct FolderEntry {
  std::string name;  // step-0000001200
  Manifest manifest;
};

// A checkpoint that has its name, but whose manifest cannot be read.
struct UnreadableCheckpoint {
  std::string name;
  Error why;
  size_t newer = 0;  // number of readable checkpoints that were certainly saved later; these are the first in the list

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

  // Returns the checkpoints with a valid manifest, the newest first. Adds others to `unreadable`, if it is not NULL,
  // except those that are still being written or were not written to their end. Throws only errors of the folder or the
  // process.
  std::vector<FolderEntry> list(std::vector<UnreadableCheckpoint> *unreadable = nullptr) const;
  // A sequence number that is higher than that of any checkpoint in the folder, including unreadable ones.
  uint64_t next_sequence() const;
  // Reads the manifest of a checkpoint; throws if it is damaged. If `sum` is not NULL, it gets the text's long_sum_of.
  Manifest read_manifest(const std::string &name, std::string *sum = nullptr) const;
  // Does the name exist, with any content?
  bool has(const std::string &name) const;
  // Is it a checkpoint without a manifest, because its job is still writing it or has ended?
  bool is_unfinished(const std::string &name) const;
  // Removes unfinished checkpoints of jobs that have ended. Returns their names.
  std::vector<std::string> remove_leftovers() const;
  // Removes a checkpoint with its contents. The checkpoint is first renamed to `.tmp-ID`, so its own name never shows
  // an incomplete checkpoint.
  void remove(const std::string &name) const;
  // Removes a checkpoint without a rename. The manifest is removed first. Without it the rest is no checkpoint, and the
  // next save removes the rest.
  void remove_in_place(const std::string &name) const;

 private:
  bool is_leftover(const std::string &name) const;
  std::string read_manifest_text(const std::string &name) const;
  size_t count_newer(const std::string &name, const std::vector<FolderEntry> &entries) const;
  std::optional<uint64_t> claimed_sequence(const std::string &name) const;
  std::optional<int64_t> written_at(const std::string &name) const;

  std::string path_;
  Fd fd_;
};

// A checkpoint that is being written. It has no name before commit(), and is removed if it is not committed.
class NewCheckpoint {
 public:
  // For the one rank that commits the checkpoint and must live until then. `name` is not empty if the checkpoint has
  // its name from the start; throws INVALID_STATE if the name is in use.
  explicit NewCheckpoint(const Folder &folder, const std::string &name = "");
  // For the other ranks: waits until this rank sees the folder that the first rank made. If that takes longer than
  // `patience_ms`, the folder is not shared. `poll` is called during the wait, and throws to end it.
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
  // Opens a folder in this one, and makes it if it does not exist. The name may be a path of several folders; an empty
  // name means this folder.
  Fd make_folder(const std::string &name) const;
  // Called when all files are on the disk: writes the manifest to the disk and gives the checkpoint its name. If a
  // checkpoint of that name exists, it is removed with `replace`, and without `replace` INVALID_STATE is thrown. Throws
  // UNSUPPORTED if the file system cannot exchange two names.
  void commit(const std::string &name, const std::string &manifest, bool replace);
  // Does the same for a folder without a manifest that does not have its name from the start.
  void commit(const std::string &name, bool replace);
  // Writes a small file into the folder.
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
// it. `way_out` tells users what else they can do.
void require_newest_is_known(const std::string &path, const std::vector<UnreadableCheckpoint> &unreadable,
                             std::string_view way_out = "");

// Returns "step-0000001200" for step 1200.
std::string step_name(uint64_t step);
bool is_checkpoint_name(const std::string &name);

}  // namespace fsdp::checkpoint
