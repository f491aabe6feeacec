// SPDX-License-Identifier: Apache-2.0
// What of a plan to load keeps it from being done, as text.
#pragma once

#include <string>

#include "base/error.h"
#include "base/json.h"
#include "checkpoint/job/load.h"

namespace fsdp::checkpoint {

inline void list_names(std::string &text, const char *what, const std::vector<std::string> &names, bool quoted) {
  if (names.empty()) return;
  text += format_text("; {}: ", what);
  for (size_t i = 0; i < names.size(); ++i) text += (i ? ", " : "") + (quoted ? quote_json(names[i]) : names[i]);
}

// Empty: it fits. The same on every rank, since they compare whole tensors.
inline std::string list_misfits(const LoadPlan &plan, const LoadOptions &options) {
  std::string text;
  if (!options.allow_missing) list_names(text, "missing", plan.missing, true);
  if (!options.allow_unexpected) list_names(text, "unexpected", plan.unexpected, true);
  list_names(text, "different", plan.other, false);
  return text;
}

}  // namespace fsdp::checkpoint
