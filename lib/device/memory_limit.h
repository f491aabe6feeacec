// SPDX-License-Identifier: Apache-2.0
// The memory that control groups (cgroups) leave for this process. Beyond their limits allocations do not fail, but the
// kernel kills the process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::device {

// The limit of the cgroup of this process, or of a cgroup above it.
struct MemoryLimit {
  std::string path;                // its directory
  uint64_t device = 0, inode = 0;  // identify the cgroup on this host, whatever its path
  uint64_t limit_bytes = 0, used_bytes = 0;
  uint64_t reclaimable_bytes = 0;  // used bytes of file cache, which the kernel gives up before it kills

  uint64_t free_bytes() const noexcept;
};

// Returns the limits, with the innermost cgroup's first. Cgroups without a limit are left out, and swap does not count.
// Only tests pass a `root`.
std::vector<MemoryLimit> read_memory_limits(const std::string &root = "");

// The cgroup of this process in the memory controller.
struct MemoryCgroup {
  std::string mount;     // mount point of the hierarchy
  std::string below;     // path of the process's cgroup under the mount point: "" or "/a/b"
  bool unified = false;  // version 2
};
// The arguments are the contents of /proc/self/cgroup and of /proc/self/mountinfo. Returns nothing if there is no
// memory controller.
std::optional<MemoryCgroup> find_memory_cgroup(std::string_view cgroup, std::string_view mounts);

}  // namespace fsdp::device
