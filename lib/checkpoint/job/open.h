// SPDX-License-Identifier: Apache-2.0
// A checkpoint that all ranks have found in a folder. Each rank reads data from it independently of the others.
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
  std::string path;  // path of the checkpoint
  std::string name;  // name in its folder
  Manifest manifest;
};

// Collective over the team: opens the newest checkpoint of the folder, or the folder itself if it is one. Throws on all
// ranks: INVALID_ARGUMENT if there is none, MISMATCH if ranks see different ones, or the error of an unreadable
// checkpoint that may be the newest.
OpenedCheckpoint open_checkpoint(transport::Team &team, const std::string &path);

// The names of a folder's checkpoints, the newest first. If the folder is a checkpoint itself, the only name is ".".
struct Candidates {
  std::vector<std::string> names;
  std::vector<UnreadableCheckpoint> unreadable;
  std::vector<std::string> seen;  // all names in the folder
  uint64_t sequence = 0;          // sequence number of the newest readable checkpoint
};
Candidates candidates_of(const Folder &folder);
// Collective. `found` are the first rank's candidates. Throws MISMATCH if another rank finds a newer checkpoint at its
// path, and the first rank still does not see it. It is no error if another rank does not see the folder, or sees it
// later.
void compare_folders(transport::Team &team, const std::string &path, const Candidates &found);
// Throws because the folder has no readable checkpoint. The error has the status of the first unreadable checkpoint and
// the errors of all, or is INVALID_ARGUMENT if the folder is empty.
[[noreturn]] void refuse_empty(const std::string &path, const std::vector<UnreadableCheckpoint> &unreadable);

// Opens a file of the checkpoint in the open folder. Throws INVALID_ARGUMENT if it is not the file in the manifest.
ShardReader open_shard(int checkpoint, const ManifestFile &file, const std::string &shown);
// find_bytes() finds the caller's bytes of that name: the rank's own bytes or, if there are none, the common bytes.
// Both functions throw INVALID_ARGUMENT if there are no bytes, or if they are damaged.
const ManifestTensor &find_bytes(const OpenedCheckpoint &checkpoint, const std::string &name, uint32_t rank);
std::vector<std::byte> read_bytes(const OpenedCheckpoint &checkpoint, const ManifestTensor &bytes,
                                  const std::function<void()> &poll);

// Describes a folder's checkpoints as JSON, for users and scripts.
std::string describe_checkpoints(const std::string &path);

}  // namespace fsdp::checkpoint
