// SPDX-License-Identifier: Apache-2.0
// All ranks of a model bring it to a folder as one checkpoint, which is there when it is whole, or not at all.
//
//   first rank: makes .tmp-ID --id--> all: write their files --sizes and sums--> first rank: manifest, then the name
//
// Where a rank fails, all report its error, and nothing of the checkpoint is left. A rank that dies fails the others;
// the next save removes what the job has left.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/failure.h"
#include "checkpoint/plan/model_shards.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

// Bytes [first, first + to.size()) of what this rank keeps of a tensor. Called on the caller's thread, in rising order;
// the bytes do not change meanwhile.
using ReadKept = std::function<void(const KeptTensor &tensor, uint64_t first, std::span<std::byte> to)>;

struct SavedModel {
  const ModelShards &shards;
  ManifestModel described;
  uint64_t step = 0;
  std::map<std::string, std::string> keys;  // kept as they are
  ReadKept read;
};

struct SaveChoice {
  bool replace = false;                  // a checkpoint of this step that is there already
  uint32_t keep = 0;                     // so many of the newest stay in the folder; 0: all
  uint32_t patience_ms = 30'000;         // for other hosts to see what the first rank made
  std::vector<std::string> spared = {};  // checkpoints of the folder that stay whatever `keep` is
};

struct SaveResult {
  std::string name;     // of the checkpoint, in the folder
  uint64_t bytes = 0;   // that this rank has written
  std::string warning;  // the first rank's: older ones that could not be removed; empty: nothing
};

// Collective over the team, which are the ranks of the mesh in its order. Throws on all ranks, naming the rank and the
// file: SYSTEM; INVALID_STATE for a checkpoint of this step that is there and is not to be replaced; MISMATCH where
// ranks save different steps, layouts or choices; UNSUPPORTED where the file system cannot exchange two names.
SaveResult save(comm::Team &team, const Waiter &waiter, const std::string &folder, const SavedModel &model,
                const SaveChoice &choice = {});

}  // namespace fsdp::checkpoint
