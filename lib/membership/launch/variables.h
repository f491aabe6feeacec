// SPDX-License-Identifier: Apache-2.0
// Environment variables, read with care.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace fsdp::membership {

// Set and empty counts as not set, as launchers do to unset a variable.
inline std::optional<std::string> variable(const char *name) {
  const char *value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): the caller's program owns its environment
  if (!value || !*value) return {};
  return value;
}

inline uint32_t number(const char *name, const std::string &value, uint32_t least, uint32_t most) {
  uint32_t result = 0;
  const char *end = value.data() + value.size();
  const auto [stop, code] = std::from_chars(value.data(), end, result);
  if (code != std::errc() || stop != end || result < least || result > most)
    fail(FSDP_INVALID_ARGUMENT, "{}='{}' is not a number from {} to {}", name, value, least, most);
  return result;
}

// All of them, or an error that says which are set and which are missing.
inline void check_complete(const char *launcher, std::initializer_list<const char *> needed) {
  std::vector<std::string_view> set, missing;
  for (const char *name : needed) (variable(name) ? set : missing).emplace_back(name);
  if (missing.empty()) return;
  fail(FSDP_INVALID_ARGUMENT, "{} {} set, but {} {} not: {} sets all of {}", fmt::join(set, ", "),
       set.size() == 1 ? "is" : "are", fmt::join(missing, ", "), missing.size() == 1 ? "is" : "are", launcher,
       fmt::join(needed, ", "));
}

}  // namespace fsdp::membership
