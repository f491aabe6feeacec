// SPDX-License-Identifier: Apache-2.0
// Lists the checkpoints of a folder, and checks whether their files are unchanged since they were written.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/convert/convert.h"
#include "checkpoint/files/folder.h"

namespace fsdp::checkpoint {

struct ListedCheckpoint {
  std::string name;
  std::optional<Manifest> manifest;  // empty if it cannot be read
  uint64_t bytes = 0;                // bytes of the files that the manifest lists
  std::string problem;               // empty: every file exists and has its size
  bool unfinished = false;           // true: the checkpoint is still being written, or was not written to its end
};
// Lists the checkpoints of a folder, the newest first and those without a manifest last. If `path` is a checkpoint
// itself, lists only that.
std::vector<ListedCheckpoint> inspect_checkpoints(const std::string &path);
// One damaged part of a checkpoint.
struct Damage {
  std::string file;  // path
  std::string what;  // names the file, the bytes and the tensors
};
struct Verified {
  uint64_t checkpoints = 0, files = 0, bytes = 0;  // numbers of checked checkpoints, files and bytes
  std::vector<Damage> damages;
};

// Verifies everything that inspect_checkpoints finds: manifests, sizes, and the checksums of headers and of every
// block.
Verified verify_checkpoints(const std::string &path, const Progress &progress);

}  // namespace fsdp::checkpoint
