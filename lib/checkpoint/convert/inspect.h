// SPDX-License-Identifier: Apache-2.0
// What a folder of checkpoints has, and whether it is what was written.
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
  std::optional<Manifest> manifest;  // none: it cannot be read
  uint64_t bytes = 0;                // of the files that the manifest speaks of
  std::string problem;               // empty: every file is there, in its size
  bool unfinished = false;           // that is its problem: it is being written, or was not to its end
};

// Of a folder, the newest first, those without a manifest last; or the checkpoint that the folder is.
std::vector<ListedCheckpoint> inspect_checkpoints(const std::string &path);

// One thing of a checkpoint that is not what was written.
struct Damage {
  std::string file;  // path
  std::string what;  // names the file, the bytes and the tensors
};

struct Verified {
  uint64_t checkpoints = 0, files = 0, bytes = 0;  // that were looked at
  std::vector<Damage> damages;
};

// All that inspect_checkpoints finds: manifests, sizes, sums of headers and of every block.
Verified verify_checkpoints(const std::string &path, const Progress &progress);

}  // namespace fsdp::checkpoint
