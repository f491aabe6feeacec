// SPDX-License-Identifier: Apache-2.0
#include "membership/liveness/core_dump.h"

#include <climits>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>

namespace fsdp::membership {
namespace {

// The number behind this name at the beginning of a line. Lines may be longer than what is read at once: what goes on
// has no name in it.
std::optional<int> read_field(const char *path, const char *name) noexcept {
  const std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen(path, "re"), std::fclose);
  if (!file) return {};
  char line[256];
  while (std::fgets(line, sizeof line, file.get())) {
    int number = 0;
    if (std::strncmp(line, name, std::strlen(name)) == 0 && std::sscanf(line + std::strlen(name), "%d", &number) == 1)
      return number;
  }
  return {};
}

}  // namespace

bool is_dumping_core(const Fd &process, const char *proc) noexcept {
  char path[PATH_MAX];
  std::snprintf(path, sizeof path, "%s/self/fdinfo/%d", proc, process.get());
  const std::optional<int> number = read_field(path, "Pid:");
  if (!number || *number <= 0) return false;  // it has been waited for, or is of another namespace
  std::snprintf(path, sizeof path, "%s/%d/status", proc, *number);
  return read_field(path, "CoreDumping:").value_or(0) == 1;
}

}  // namespace fsdp::membership
