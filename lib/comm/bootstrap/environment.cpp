// SPDX-License-Identifier: Apache-2.0
// What the launcher's variables say.
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace fsdp::comm {
namespace {

constexpr const char *needed[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
constexpr size_t longest_secret = 4096;

// Set and empty counts as not set, as launchers do to unset a variable.
std::optional<std::string> variable(const char *name) {
  const char *value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): the caller's program owns its environment
  if (!value || !*value) return {};
  return value;
}

uint32_t number(const char *name, const std::string &value, uint32_t least, uint32_t most) {
  uint32_t result = 0;
  const char *end = value.data() + value.size();
  const auto [stop, code] = std::from_chars(value.data(), end, result);
  if (code != std::errc() || stop != end || result < least || result > most)
    fail(FSDP_INVALID_ARGUMENT, "{}='{}' is not a number from {} to {}", name, value, least, most);
  return result;
}

void check_complete() {
  std::vector<std::string_view> set, missing;
  for (const char *name : needed) (variable(name) ? set : missing).emplace_back(name);
  if (!set.empty() && !missing.empty())
    fail(FSDP_INVALID_ARGUMENT,
         "{} {} set, but {} {} not: a launcher sets all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
         fmt::join(set, ", "), set.size() == 1 ? "is" : "are", fmt::join(missing, ", "),
         missing.size() == 1 ? "is" : "are");
}

void check_local(const WorldOptions &options) {
  const auto local_size = variable("LOCAL_WORLD_SIZE");
  const auto local_rank = variable("LOCAL_RANK");
  uint32_t size = options.size;
  if (local_size) {
    size = number("LOCAL_WORLD_SIZE", *local_size, 1, options.size);
    if (size != options.size)
      fail(FSDP_UNSUPPORTED,
           "WORLD_SIZE={} and LOCAL_WORLD_SIZE={}: ranks on several hosts need a communicator between hosts; this "
           "release has "
           "one host",
           options.size, size);
  }
  if (local_rank) number("LOCAL_RANK", *local_rank, 0, size - 1);
}

}  // namespace

std::string read_job_secret() {
  const auto secret = variable("FSDP_JOB_SECRET");
  const auto path = variable("FSDP_JOB_SECRET_FILE");
  if (secret && path) fail(FSDP_INVALID_ARGUMENT, "FSDP_JOB_SECRET and FSDP_JOB_SECRET_FILE are both set; set one");
  if (secret) return *secret;
  if (!path) return {};
  std::ifstream file(*path, std::ios::binary);
  if (!file) fail(FSDP_INVALID_ARGUMENT, "FSDP_JOB_SECRET_FILE='{}': {}", *path, std::strerror(errno));
  std::string text(longest_secret + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  if (text.empty() || text.size() > longest_secret)
    fail(FSDP_INVALID_ARGUMENT, "FSDP_JOB_SECRET_FILE='{}': a secret of 1 to {} bytes is expected", *path,
         longest_secret);
  return text;
}

WorldOptions read_launcher_environment() {
  WorldOptions options;
  check_complete();
  if (!variable("RANK")) return options;
  options.size = number("WORLD_SIZE", *variable("WORLD_SIZE"), 1, INT32_MAX);
  options.rank = number("RANK", *variable("RANK"), 0, INT32_MAX);
  if (options.rank >= options.size)
    fail(FSDP_INVALID_ARGUMENT, "RANK={} is outside [0, WORLD_SIZE={})", options.rank, options.size);
  const uint32_t port = number("MASTER_PORT", *variable("MASTER_PORT"), 1, 65535);
  options.rendezvous = format_text("{}:{}", *variable("MASTER_ADDR"), port);
  check_local(options);
  options.secret = read_job_secret();
  return options;
}

}  // namespace fsdp::comm
