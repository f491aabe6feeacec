// SPDX-License-Identifier: Apache-2.0
#include "run/job_environment.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace run {
namespace {

constexpr std::string_view tcp_scheme = "tcp://";

bool is_set(const char *name) {
  const char *value = std::getenv(name);
  return value && *value;
}

std::string make_secret() {
  unsigned char bytes[32];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
    throw std::system_error(errno, std::generic_category(), "cannot make a job secret");
  std::string secret;
  for (const auto byte : bytes) secret += fmt::format("{:02x}", byte);
  return secret;
}

// Ranks of one machine need no secret from outside, and one that is there could be another job's.
void add_secret(const JobOptions &options, RankProcess::Environment &environment) {
  if (options.nodes == 1) {
    environment.emplace_back("FSDP_JOB_SECRET", make_secret());
    environment.emplace_back("FSDP_JOB_SECRET_FILE", std::nullopt);
  } else if (!is_set("FSDP_JOB_SECRET") && !is_set("FSDP_JOB_SECRET_FILE")) {
    throw UsageError(
        fmt::format("--nnodes {}: the machines need a job secret that all share: set FSDP_JOB_SECRET_FILE to a file "
                    "with the same text on each (openssl rand -hex 32 >FILE makes one), or FSDP_JOB_SECRET",
                    options.nodes));
  }
}

void add_place(const JobOptions &options, uint16_t port, RankProcess::Environment &environment) {
  const std::string &place = options.rendezvous;
  if (place.empty()) {
    if (options.nodes > 1)
      throw UsageError(
          fmt::format("--nnodes {} needs --rendezvous tcp://HOST:PORT, HOST being that of node 0 (or "
                      "file:///DIRECTORY, which all machines share)",
                      options.nodes));
    environment.emplace_back("MASTER_ADDR", "127.0.0.1");
    environment.emplace_back("MASTER_PORT", std::to_string(port));
    environment.emplace_back("FSDP_RENDEZVOUS", std::nullopt);
    return;
  }
  environment.emplace_back("FSDP_RENDEZVOUS", place);
  const size_t colon = place.rfind(':');
  if (!place.starts_with(tcp_scheme)) {
    if (!place.starts_with("file:///"))
      throw UsageError(fmt::format("--rendezvous {}: tcp://HOST:PORT or file:///DIRECTORY is expected", place));
    for (const char *name : {"MASTER_ADDR", "MASTER_PORT"}) environment.emplace_back(name, std::nullopt);
  } else if (colon <= tcp_scheme.size() || colon + 1 == place.size()) {
    throw UsageError(fmt::format("--rendezvous {}: HOST:PORT is expected behind tcp://", place));
  } else {
    environment.emplace_back("MASTER_ADDR", place.substr(tcp_scheme.size(), colon - tcp_scheme.size()));
    environment.emplace_back("MASTER_PORT", place.substr(colon + 1));
  }
}

// Ranks may work in another directory than the one that they are started in, so the path is absolute. The directory
// must exist.
std::string make_directory(const std::string &given) {
  const std::filesystem::path directory = std::filesystem::absolute(given);
  std::error_code code;
  std::filesystem::create_directories(directory, code);
  if (code || !std::filesystem::is_directory(directory))
    throw UsageError(fmt::format("--trace {}: cannot make this directory: {}", given,
                                 code ? code.message() : "a file has its name"));
  return directory.string();
}

void add_help(const JobOptions &options, RankProcess::Environment &environment) {
  if (!options.log.empty()) environment.emplace_back("FSDP_LOG", options.log);
  if (options.debug) environment.emplace_back("FSDP_DEBUG", "1");
  if (!options.trace.empty()) environment.emplace_back("FSDP_TRACE", make_directory(options.trace));
  if (options.wait_seconds) environment.emplace_back("FSDP_TIMEOUT", std::to_string(options.wait_seconds));
}

}  // namespace

JobEnvironment::JobEnvironment(const JobOptions &options, uint16_t port)
    : first_rank_(options.node_rank * options.ranks) {
  if (options.node_rank >= options.nodes)
    throw UsageError(fmt::format("--node-rank {} is outside [0, --nnodes {})", options.node_rank, options.nodes));
  shared_.emplace_back("WORLD_SIZE", std::to_string(options.nodes * options.ranks));
  shared_.emplace_back("LOCAL_WORLD_SIZE", std::to_string(options.ranks));
  add_place(options, port, shared_);
  add_secret(options, shared_);
  add_help(options, shared_);
  if (options.debug) fault_lines_.emplace().add_to(shared_);
}

RankProcess::Environment JobEnvironment::of_rank(uint32_t local_rank, uint32_t attempt) const {
  auto environment = shared_;
  environment.emplace_back("RANK", std::to_string(first_rank_ + local_rank));
  environment.emplace_back("LOCAL_RANK", std::to_string(local_rank));
  environment.emplace_back("FSDP_RESTART_COUNT", std::to_string(attempt));
  return environment;
}

}  // namespace run
