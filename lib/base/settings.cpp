// SPDX-License-Identifier: Apache-2.0
#include "base/settings.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/error.h"

namespace fsdp {
namespace {

constexpr Setting list[] = {
    {"FSDP_RENDEZVOUS", "the launcher's"},
    {"FSDP_JOB_SECRET", "none", true},
    {"FSDP_JOB_SECRET_FILE", "none"},
    {"FSDP_RESTART_COUNT", "0"},
    {"FSDP_TIMEOUT", "300 s"},
    {"FSDP_LOG", "warning, to the callback alone"},
    {"FSDP_DEBUG", "0"},
    {"FSDP_DEBUG_VIEWS", "none"},
    {"FSDP_TRACE", "none"},
    {"FSDP_FLIGHT_DIRECTORY", "none"},
    {"FSDP_NET", "auto"},
    {"FSDP_NET_INTERFACE", "that of the way to the rendezvous"},
    {"FSDP_NET_CHUNK_BYTES", "61440"},
    {"FSDP_NET_CHECKSUM", "none"},
    {"FSDP_NET_ENCRYPTION", "off"},
    {"FSDP_SSL_LIBRARY", "the system's"},
    {"FSDP_UCX_TCP", "not trusted"},
    {"FSDP_UCX_LIBRARY", "the system's"},
    {"FSDP_NCCL_LIBRARY", "the first that is found"},
    {"FSDP_NCCL_WINDOWS", "by NCCL's version"},
    {"FSDP_NCCL_COPY_ENGINES", "0"},
    {"FSDP_NCCL_BLOCKING", "1"},
    {"FSDP_NCCL_MIN_CTAS", "NCCL's"},
    {"FSDP_NCCL_MAX_CTAS", "NCCL's"},
    {"FSDP_NCCL_CGA_CLUSTER_SIZE", "NCCL's"},
    {"FSDP_NCCL_NVLS_CTAS", "NCCL's"},
};

// The environment belongs to the caller's program, so no thread of this library changes it.
const char *read(const char *name) noexcept { return std::getenv(name); }  // NOLINT(concurrency-mt-unsafe)

// Keeps the value on one line, with any contents.
std::string shown(std::string value) {
  std::ranges::replace_if(
      value, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return value;
}

}  // namespace

std::span<const Setting> settings() noexcept { return list; }

const char *setting(const char *name) {
  const auto is_this = [name](const Setting &one) { return std::string_view(one.name) == name; };
  if (std::ranges::none_of(list, is_this)) fail(FSDP_INTERNAL, "{} is not in the list of settings", name);
  return read(name);
}

std::string describe_settings() {
  std::string text;
  for (const Setting &one : list) {
    const char *value = read(one.name);
    const bool is_set = value && *value;
    text += format_text("{}: {} ({})\n", one.name,
                        !is_set         ? std::string(one.otherwise)
                        : one.is_secret ? std::string("set")
                                        : shown(value),
                        is_set ? "environment" : "default");
  }
  return text;
}

}  // namespace fsdp
