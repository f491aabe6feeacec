// SPDX-License-Identifier: Apache-2.0
#include "device/memory_limit.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>

namespace fsdp::device {
namespace {

// In version 1 a limit of this size or more means "no limit". Version 2 has a word for this.
constexpr uint64_t no_limit = uint64_t{1} << 62;

struct Names {
  const char *limit, *used;
  std::string_view cache[2];  // names in memory.stat; the values include the cgroups below
};
constexpr Names unified_names{"memory.max", "memory.current", {"inactive_file", "active_file"}};
constexpr Names old_names{
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};

std::string read_text(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string_view take(std::string_view &text, char end) {
  const size_t length = std::min(text.find(end), text.size());
  const std::string_view word = text.substr(0, length);
  text.remove_prefix(std::min(length + 1, text.size()));
  return word;
}

bool lists(std::string_view names, std::string_view name) {
  while (!names.empty())
    if (take(names, ',') == name) return true;
  return false;
}

std::optional<uint64_t> number_of(std::string_view text) {
  uint64_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (code != std::errc() || end == text.data()) return {};
  return number;
}

uint64_t cache_bytes(std::string_view text, const Names &names) {
  uint64_t bytes = 0;
  while (!text.empty()) {
    std::string_view line = take(text, '\n');
    const std::string_view name = take(line, ' ');
    if (name == names.cache[0] || name == names.cache[1]) bytes += number_of(line).value_or(0);
  }
  return bytes;
}

std::optional<MemoryLimit> read_limit(const std::string &root, const std::string &path, const Names &names) {
  const std::string place = root + path + '/';
  const auto limit = number_of(read_text(place + names.limit)), used = number_of(read_text(place + names.used));
  struct stat status {};
  if (!limit || *limit >= no_limit || !used || ::stat(place.c_str(), &status) != 0) return {};
  MemoryLimit found{path, status.st_dev, status.st_ino, *limit, *used, 0};
  found.reclaimable_bytes = std::min(cache_bytes(read_text(place + "memory.stat"), names), found.used_bytes);
  return found;
}

// A mount may show only a part of the hierarchy, as in containers. Paths of processes may or may not begin with the
// path of that part.
std::string below_mount(std::string_view path, std::string_view shown) {
  if (shown.size() > 1) {
    const bool inside = path.starts_with(shown) && (path.size() == shown.size() || path[shown.size()] == '/');
    path = inside ? path.substr(shown.size()) : "";
  }
  if (path.find("/..") != std::string_view::npos || path == "/") path = "";
  return std::string(path);
}

// "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory".
struct Mount {
  std::string_view shown, at, type, options;
};
Mount read_mount(std::string_view line) {
  Mount mount;
  for (int skipped = 0; skipped < 3; ++skipped) take(line, ' ');
  mount.shown = take(line, ' ');
  mount.at = take(line, ' ');
  while (!line.empty() && take(line, ' ') != "-") {
  }
  mount.type = take(line, ' ');
  take(line, ' ');
  mount.options = line;
  return mount;
}

}  // namespace

uint64_t MemoryLimit::free_bytes() const noexcept {
  const uint64_t needed = used_bytes - reclaimable_bytes;
  return limit_bytes > needed ? limit_bytes - needed : 0;
}

// The lines are "number:controllers:path". The line of version 1's memory controller is used if there is one, else the
// line without controllers.
std::optional<MemoryCgroup> find_memory_cgroup(std::string_view cgroup, std::string_view mounts) {
  std::optional<std::string_view> old_path, unified_path;
  while (!cgroup.empty()) {
    std::string_view line = take(cgroup, '\n');
    const std::string_view number = take(line, ':'), controllers = take(line, ':');
    if (lists(controllers, "memory")) old_path = line;
    if (number == "0" && controllers.empty()) unified_path = line;
  }
  const bool unified = !old_path;
  const auto path = unified ? unified_path : old_path;
  while (path && !mounts.empty()) {
    const Mount mount = read_mount(take(mounts, '\n'));
    if (unified ? mount.type == "cgroup2" : mount.type == "cgroup" && lists(mount.options, "memory"))
      return MemoryCgroup{std::string(mount.at), below_mount(*path, mount.shown), unified};
  }
  return {};
}

std::vector<MemoryLimit> read_memory_limits(const std::string &root) {
  std::vector<MemoryLimit> limits;
  const auto place =
      find_memory_cgroup(read_text(root + "/proc/self/cgroup"), read_text(root + "/proc/self/mountinfo"));
  if (!place) return limits;
  const Names &names = place->unified ? unified_names : old_names;
  for (std::string below = place->below;; below.resize(below.rfind('/'))) {
    if (auto limit = read_limit(root, place->mount + below, names)) limits.push_back(std::move(*limit));
    if (below.empty()) return limits;
  }
}

}  // namespace fsdp::device
