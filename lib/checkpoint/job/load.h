// SPDX-License-Identifier: Apache-2.0
// All ranks of a model take what they keep out of a checkpoint, which may be of any number of ranks and strategies.
// Each reads the ranges that it needs, or its part of what several need; in the end all have succeeded, or all report
// the first one's error.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/failure.h"
#include "checkpoint/job/row_taker.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/save_plan.h"
#include "transport/team.h"

namespace fsdp::checkpoint {

struct LoadedModel {
  const ModelShards &shards;
  uint64_t layout_hash;         // of the model, which ranks compare
  std::function<void()> begin;  // a checkpoint is read from its first file on; another one may have been, in part
  WriteKept write;
  // For ranks that read for each other: what was written; and those of the same place on the inner axis, in the outer
  // one's order, if there are several.
  ReadKept read = {};
  transport::Team *outer = nullptr;
};

struct LoadOptions {
  bool states = true;             // of the optimizer, too
  bool allow_missing = false;     // what the checkpoint lacks stays as it is
  bool allow_unexpected = false;  // what only the checkpoint has is passed over
  bool fall_back = false;         // to the next older one where one is damaged
  bool if_any = false;            // nothing is loaded from a folder that is not there or has nothing of ours, or of the
                                  // model's where allow_missing
  bool one_replica = false;       // ranks that keep the same rows read a part of them each, and give it to each other
  std::optional<std::string> model = {};  // by name, of several in a checkpoint; nothing: the only one
};

struct LoadResult {
  std::string name;  // of the checkpoint, in the folder; empty: there was none, and the options allow that
  Manifest manifest;
  uint64_t wanted_bytes = 0, read_bytes = 0;  // of files, by this rank
  LoadedTensors tensors;
  std::vector<std::string> passed_over;       // why, of damaged ones that may be newer; the same on every rank
  std::vector<std::string> older_unreadable;  // ... that are older, on the first rank
};

// Collective over the team, which are the ranks of the mesh in its order. The newest whole checkpoint of the folder; or
// the folder is one itself. Throws on all ranks: SYSTEM or INVALID_ARGUMENT, naming rank, file and bytes, and then some
// rows may have been written; INVALID_ARGUMENT with all that does not fit the model, and MISMATCH where ranks load
// different models, with different options, or see different manifests, before anything is written.
LoadResult load(transport::Team &team, const Waiter &waiter, const std::string &folder, const LoadedModel &model,
                const LoadOptions &options = {});

}  // namespace fsdp::checkpoint
