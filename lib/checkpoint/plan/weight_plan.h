// SPDX-License-Identifier: Apache-2.0
// Maps weights in other programs' files to a model: by name or by renames. Pure, and the same on every rank, except for
// the rank's own rows.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/format/box.h"
#include "checkpoint/plan/load_plan.h"

namespace fsdp::checkpoint {

// Maps the names of other programs' tensors ("theirs") to the names of the model's tensors ("ours"), and rows to rows.
// A rename maps a tensor of theirs, or rows of it, to a tensor of ours, or rows of it. One of theirs may become several
// of ours, and several of theirs may become one of ours.
struct Rename {
  std::string theirs, ours;           // each has at most one '*', which stands for the same text in both
  uint64_t from_row = 0, to_row = 0;  // first row in theirs (after transposing), and in our whole tensor, not a box
  uint64_t row_count = 0;             // 0: all rows from from_row on
  bool transposed = false;            // theirs is transposed when it is read
};
// Throws INVALID_ARGUMENT, which names the list, if a rename is invalid in any list.
void check_renames(std::span<const Rename> renames, std::string_view call);
// Returns the text that the '*' of a pattern stands for in a name. It is "" if the pattern has no '*' and equals the
// name. Returns nothing if the name does not match.
std::optional<std::string> match_name(const std::string &pattern, const std::string &name);
// Returns the pattern with '*' replaced by the text.
std::string fill_name(std::string pattern, const std::string &text);
// Files have the numbers of their order in the list. The plan's `missing` lists missing tensors; `other` lists tensors
// with missing rows.
LoadPlan plan_weights(const ModelShards &shards, std::span<const StoredFile> files, std::span<const Rename> renames,
                      uint32_t rank);

}  // namespace fsdp::checkpoint
