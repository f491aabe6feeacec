// SPDX-License-Identifier: Apache-2.0
// All ranks of a model load the rows that they keep from a checkpoint, which may have been saved by any number of
// ranks, with any strategies. Each rank reads the ranges that it needs, or its part of ranges that several ranks need.
// In the end all ranks have succeeded, or all report the same error.
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
  uint64_t layout_hash;         // hash of the model, which ranks compare
  std::function<void()> begin;  // called before a checkpoint is read; an earlier one may have been read in part
  WriteKept write;
  // For ranks that read for each other: `read` reads the written rows again. If the outer axis has several ranks,
  // `outer` are the ranks at the same place on the inner axis, in the order of the outer axis.
  ReadKept read = {};
  transport::Team *outer = nullptr;
};

struct LoadOptions {
  bool states = true;             // loads optimizer states, too
  bool allow_missing = false;     // tensors that the checkpoint lacks stay as they are
  bool allow_unexpected = false;  // tensors that only the checkpoint has are ignored
  bool fall_back = false;         // if a checkpoint is damaged, the next older one is tried
  bool if_any = false;            // loads nothing if the folder does not exist or has none of our checkpoints; with
                                  // allow_missing also if it has nothing of the model
  bool one_replica = false;       // ranks that keep the same rows each read a part of them, and exchange the parts
  std::optional<std::string> model = {};  // the name of the model in the checkpoint; nothing: it has only one
};
struct LoadResult {
  std::string name;  // the checkpoint's name in the folder; empty: there was none, and the options allow that
  Manifest manifest;
  uint64_t wanted_bytes = 0, read_bytes = 0;  // bytes of files that this rank needed, and bytes that it read
  LoadedTensors tensors;
  std::vector<std::string> passed_over;  // why damaged checkpoints that may be newer were skipped; same on all ranks
  std::vector<std::string> older_unreadable;  // reasons for skipping older ones; only on the first rank
};
// Collective over the team: the ranks of the mesh, in its order. Loads the newest complete checkpoint of the folder, or
// the folder itself if it is a checkpoint. Throws on all ranks. SYSTEM and INVALID_ARGUMENT name rank, file and bytes;
// some rows may then have been written. Errors before the first write are INVALID_ARGUMENT, with everything that does
// not fit the model, and MISMATCH, if ranks load different models, use different options or see different manifests.
LoadResult load(transport::Team &team, const Waiter &waiter, const std::string &folder, const LoadedModel &model,
                const LoadOptions &options = {});

// Texts that say why a load plan cannot be carried out.
inline constexpr size_t max_examples = 5;  // number of names to list if none fits, since all would be too many
// Lists at most `most` names, and says how many are left out.
inline void list_names(std::string &text, const char *what, const std::vector<std::string> &names, bool quoted,
                       size_t most = SIZE_MAX) {
  if (names.empty()) return;
  text += format_text("; {}: ", what);
  for (size_t i = 0; i < std::min(names.size(), most); ++i)
    text += (i ? ", " : "") + (quoted ? quote_json(names[i]) : names[i]);
  if (names.size() > most) text += format_text(" and {} more", names.size() - most);
}

// Says why the plan does not fit; empty if it does. The text is the same on every rank, because whole tensors are
// compared.
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

// Loads a model's weights from safetensors files of any program: one file, a folder of files, with or without Hugging
// Face's index, or a checkpoint of PyTorch or of ours. Collective over the team. Uses only the options allow_missing,
// allow_unexpected and if_any. Throws like load().
LoadResult load_weights(transport::Team &team, const Waiter &waiter, const std::string &path, const LoadedModel &model,
                        std::span<const Rename> renames, const LoadOptions &options = {});

}  // namespace fsdp::checkpoint
