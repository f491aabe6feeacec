// SPDX-License-Identifier: Apache-2.0
// A checkpoint that all ranks have found in a folder, and what can be read of it without the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/failure.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/files/shard_reader.h"
#include "transport/team.h"

namespace fsdp::checkpoint {

struct OpenedCheckpoint {
  std::string path;  // its own
  std::string name;  // in its folder
  Manifest manifest;
};

// Collective over the team: the newest of the folder, or the one that the folder is. Throws on all ranks:
// INVALID_ARGUMENT where there is none, MISMATCH where they see different ones; what is wrong with one that cannot be
// read and may be the newest.
OpenedCheckpoint open_checkpoint(transport::Team &team, const std::string &path);

// The names of a folder's checkpoints, the newest first; "." if it is one itself.
struct Candidates {
  std::vector<std::string> names;
  std::vector<UnreadableCheckpoint> unreadable;
  std::vector<std::string> seen;  // all names in the folder
  uint64_t sequence = 0;          // of the newest that can be read
};
Candidates candidates_of(const Folder &folder);
// Collective: MISMATCH where another rank finds a newer checkpoint at its path than all that the first one, whose
// candidates these are, has found, and the first one still does not see it. A folder that another rank does not see, or
// sees later, is not told here.
void compare_folders(transport::Team &team, const std::string &path, const Candidates &found);
// There is none in it that can be read: the status of the first that cannot, with what is wrong with each; of an empty
// folder INVALID_ARGUMENT.
[[noreturn]] void refuse_empty(const std::string &path, const std::vector<UnreadableCheckpoint> &unreadable);

// A file of the checkpoint in the open folder. INVALID_ARGUMENT where it is not the one that the manifest speaks of.
ShardReader open_shard(int checkpoint, const ManifestFile &file, const std::string &shown);

// The caller's bytes of that name: those of the rank, else those of all. INVALID_ARGUMENT where there are none, or they
// are damaged.
const ManifestTensor &find_bytes(const OpenedCheckpoint &checkpoint, const std::string &name, uint32_t rank);
std::vector<std::byte> read_bytes(const OpenedCheckpoint &checkpoint, const ManifestTensor &bytes,
                                  const std::function<void()> &poll);

// Of a folder, as JSON for people and scripts.
std::string describe_checkpoints(const std::string &path);

}  // namespace fsdp::checkpoint
