// SPDX-License-Identifier: Apache-2.0
// What of a plan to load keeps it from being done, as text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "checkpoint/job/load.h"

namespace fsdp::checkpoint {

inline constexpr size_t most_examples = 5;  // of names, where none fits and all of them would be too many

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
    list_names(text, "missing", plan.missing, true, most_examples);
    list_names(text, "unexpected", plan.unexpected, true, most_examples);
  }
  return text;
}

}  // namespace fsdp::checkpoint
