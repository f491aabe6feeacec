// SPDX-License-Identifier: Apache-2.0
#include "engine/context/environment.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/settings.h"
#include "membership/launch/launchers.h"

namespace fsdp::engine {
namespace {

constexpr std::array<std::string_view, 4> level_names{"error", "warning", "info", "debug"};
constexpr uint32_t max_seconds = UINT32_MAX / 1000;

fsdp_log_level parse_level(const std::string &value) {
  for (size_t i = 0; i < level_names.size(); ++i)
    if (value == level_names[i]) return FSDP_LOG_ERROR + static_cast<fsdp_log_level>(i);
  fail(FSDP_INVALID_ARGUMENT, "FSDP_LOG='{}' is not a level: error, warning, info or debug", value);
}

bool parse_switch(const char *name, const std::string &value) {
  if (value != "0" && value != "1") fail(FSDP_INVALID_ARGUMENT, "{}='{}' is not 0 or 1", name, value);
  return value == "1";
}

uint32_t parse_seconds(const char *name, const std::string &value) {
  try {
    return membership::number(name, value, 1, max_seconds);
  } catch (const Error &) {
    fail(FSDP_INVALID_ARGUMENT, "{}='{}' is not a whole number of seconds from 1 to {}", name, value, max_seconds);
  }
}

}  // namespace

// Reads all variables, also those that an option overrides, so that a wrong value is reported in every run.
void read_environment(fsdp_context_options &options) {
  if (const auto level = membership::variable("FSDP_LOG")) {
    const fsdp_log_level parsed = parse_level(*level);
    if (!options.log_level) options.log_level = parsed;
    if (!options.log) options.log = log_to_standard_error;
  }
  if (const auto debug = membership::variable("FSDP_DEBUG"); debug && parse_switch("FSDP_DEBUG", *debug))
    options.flags |= FSDP_CONTEXT_DEBUG;
  if (const auto timeout = membership::variable("FSDP_TIMEOUT")) {
    const uint32_t seconds = parse_seconds("FSDP_TIMEOUT", *timeout);
    if (!options.timeout_ms) options.timeout_ms = seconds * 1000;
  }
  if (!options.trace_directory && membership::variable("FSDP_TRACE")) options.trace_directory = setting("FSDP_TRACE");
}

std::string debug_views_directory() {
  const char *directory =
      setting("FSDP_DEBUG_VIEWS");  // NOLINT(concurrency-mt-unsafe): the caller's program owns its environment
  return directory ? directory : "";
}

// Each message is one write, so that lines of ranks that share a terminal stay whole. A message that already begins
// with this rank's name is not changed.
void log_to_standard_error(void *rank, fsdp_log_level, const char *message) {
  try {
    const std::string front = format_text("rank {}: ", *static_cast<const uint32_t *>(rank));
    std::string text;
    for (std::string_view rest = message; !rest.empty();) {
      const std::string_view line = rest.substr(0, rest.find('\n'));
      rest.remove_prefix(std::min(rest.size(), line.size() + 1));
      text += format_text("{}{}\n", line.starts_with(front) ? "" : front, line);
    }
    std::fwrite(text.data(), 1, text.size(), stderr);
  } catch (...) {  // losing a line is better than failing a step
  }
}

}  // namespace fsdp::engine
