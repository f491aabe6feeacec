// SPDX-License-Identifier: Apache-2.0
// All ranks of a model take what they keep out of a checkpoint, which may be of any number of ranks and strategies.
// Each reads the ranges that it needs, or its part of what several need; in the end all have succeeded, or all report
// the first one's error.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/failure.h"
#include "base/text.h"
#include "checkpoint/job/gather_shares.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/plan/weight_plan.h"
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
// the folder is one itself. Throws on all ranks. SYSTEM or INVALID_ARGUMENT name rank, file and bytes, and then some
// rows may have been written. Before anything is written: INVALID_ARGUMENT with all that does not fit the model, and
// MISMATCH where ranks load different models, with different options, or see different manifests.
LoadResult load(transport::Team &team, const Waiter &waiter, const std::string &folder, const LoadedModel &model,
                const LoadOptions &options = {});

// All ranks of a model take its weights out of safetensors files of any program. The path is one file, or a folder with
// several, with or without Hugging Face's index, or a checkpoint, of PyTorch or of ours.

// What of a plan to load keeps it from being done, as text.

inline constexpr size_t max_examples = 5;  // of names, where none fits and all of them would be too many

// most: of the names; what is left out is counted.
inline void list_names(std::string &text, const char *what, const std::vector<std::string> &names, bool quoted,
                       size_t most = SIZE_MAX) {
  if (names.empty()) return;
  text += format_text("; {}: ", what);
  for (size_t i = 0; i < std::min(names.size(), most); ++i)
    text += (i ? ", " : "") + (quoted ? quote_json(names[i]) : names[i]);
  if (names.size() > most) text += format_text(" and {} more", names.size() - most);
}

// Empty: it fits. The same on every rank, since they compare whole tensors.
inline std::string list_misfits(const LoadPlan &plan, const LoadOptions &options) {
  std::string text;
  if (!options.allow_missing) list_names(text, "missing", plan.missing, true);
  if (!options.allow_unexpected) list_names(text, "unexpected", plan.unexpected, true);
  list_names(text, "different", plan.other, false);
  if (!options.allow_missing && !plan.missing.empty())
    text += "; FSDP_LOAD_ALLOW_MISSING leaves what is missing as it is";
  if (!options.allow_unexpected && !plan.unexpected.empty())
    text += "; FSDP_LOAD_ALLOW_UNEXPECTED passes over what is unexpected";
  if (text.empty() && plan.loaded.empty() && !plan.missing.empty() && !options.if_any) {
    text = ": it has none of the model's tensors, and FSDP_LOAD_IF_ANY would allow that";
    list_names(text, "missing", plan.missing, true, max_examples);
    list_names(text, "unexpected", plan.unexpected, true, max_examples);
  }
  return text;
}

// Collective over the team. Of the options allow_missing, allow_unexpected and if_any count. Throws as load() does.
LoadResult load_weights(transport::Team &team, const Waiter &waiter, const std::string &path, const LoadedModel &model,
                        std::span<const Rename> renames, const LoadOptions &options = {});

}  // namespace fsdp::checkpoint
