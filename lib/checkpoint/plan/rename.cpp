// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/plan/rename.h"

#include <algorithm>

#include "base/error.h"
#include "base/json.h"

namespace fsdp::checkpoint {

void check_renames(std::span<const Rename> renames, std::string_view call) {
  for (size_t i = 0; i < renames.size(); ++i) {
    const Rename &rename = renames[i];
    const auto stars = [](const std::string &text) { return std::ranges::count(text, '*'); };
    if (stars(rename.theirs) > 1 || stars(rename.ours) > stars(rename.theirs))
      fail(FSDP_INVALID_ARGUMENT, "{}: renames[{}]: {} to {}: one '*' in theirs, and then one or none in ours", call, i,
           quote_json(rename.theirs), quote_json(rename.ours));
  }
}

std::optional<std::string> match_name(const std::string &pattern, const std::string &name) {
  const size_t star = pattern.find('*');
  if (star == pattern.npos) return pattern == name ? std::optional<std::string>("") : std::nullopt;
  const std::string_view before = std::string_view(pattern).substr(0, star),
                         behind = std::string_view(pattern).substr(star + 1);
  if (name.size() < before.size() + behind.size() || !name.starts_with(before) || !name.ends_with(behind))
    return std::nullopt;
  return name.substr(before.size(), name.size() - before.size() - behind.size());
}

std::string fill_name(std::string pattern, const std::string &text) {
  if (const size_t star = pattern.find('*'); star != pattern.npos) pattern.replace(star, 1, text);
  return pattern;
}

}  // namespace fsdp::checkpoint
