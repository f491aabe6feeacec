// SPDX-License-Identifier: Apache-2.0
// All ranks of a model load what they keep from a checkpoint, which may have been saved by any number of ranks, with
// any strategies. Each rank reads the ranges that it needs, or its part of ranges that several ranks need. In the end
// all ranks have succeeded, or all report the same error.
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
  std::function<void()> begin;  // called before a checkpoint is read; another one may have been read in part before
  WriteKept write;
  // For ranks that read for each other: `read` reads what was written. `outer` are the ranks at the same place on the
  // inner axis, in the order of the outer axis, if there are several.
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
  uint64_t wanted_bytes = 0, read_bytes = 0;  // bytes of files that this rank wanted and read
  LoadedTensors tensors;
  std::vector<std::string> passed_over;  // why damaged checkpoints that may be newer were skipped; same on all ranks
  std::vector<std::string> older_unreadable;  // the same for older ones; only on the first rank
};
// Collective over the team, which are the ranks of the mesh in its order. Loads the newest whole checkpoint of the
// folder, or the folder itself if it is a checkpoint. Throws on all ranks. SYSTEM and INVALID_ARGUMENT name rank, file
// and bytes; some rows may then have been written. Errors before anything is written are INVALID_ARGUMENT, with all
// that does not fit the model, and MISMATCH, if ranks load different models, use different options or see different
// manifests.
LoadResult load(transport::Team &team, const Waiter &waiter, const std::string &folder, const LoadedModel &model,
                const LoadOptions &options = {});

// All ranks of a model load its weights from safetensors files of any program. The path is one file, a folder with
// several files, with or without Hugging Face's index, or a checkpoint of PyTorch or of ours.
// Texts that say why a load plan cannot be carried out.
inline constexpr size_t max_examples = 5;  // number of names to list if none fits, since all would be too many
// Lists at most `most` names; the text says how many are left out.
inline void list_names(std::string &text, const char *what, const std::vector<std::string> &names, bool quoted,
                       size_t most = SIZE_MAX) {
  if (names.empty()) return;
  text += format_text("; {}: ", what);
  for (size_t i = 0; i < std::min(names.size(), most); ++i)
    text += (i ? ", " : "") + (quoted ? quote_json(names[i]) : names[i]);
  if (names.size() > most) text += format_text(" and {} more", names.size() - most);
}

// Returns an empty text if the plan fits. The text is the same on every rank, since whole tensors are compared.
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

// Collective over the team. Only the options allow_missing, allow_unexpected and if_any are used. Throws like load().
LoadResult load_weights(transport::Team &team, const Waiter &waiter, const std::string &path, const LoadedModel &model,
                        std::span<const Rename> renames, const LoadOptions &options = {});

}  // namespace fsdp::checkpoint
