// SPDX-License-Identifier: Apache-2.0
// The memory that control groups (cgroups) leave this process. Beyond their limits the kernel kills: no allocation
// fails.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::device {

// Of one cgroup that this process is in, or of one above that.
struct MemoryLimit {
  std::string path;                // its directory
  uint64_t device = 0, inode = 0;  // that tell it from all others of this host, whatever their paths
  uint64_t limit_bytes = 0, used_bytes = 0;
  uint64_t reclaimable_bytes = 0;  // of those used: file cache, which the kernel gives up before it kills

  uint64_t free_bytes() const noexcept;
};

// The innermost first; those without a limit are left out. Swap does not count. root: "" but for tests.
std::vector<MemoryLimit> read_memory_limits(const std::string &root = "");

// Where the memory controller has this process.
struct MemoryCgroup {
  std::string mount;     // of the hierarchy
  std::string below;     // the process's cgroup under it: "" or "/a/b"
  bool unified = false;  // version 2
};
// cgroup: /proc/self/cgroup; mounts: /proc/self/mountinfo. Empty where there is no such controller.
std::optional<MemoryCgroup> find_memory_cgroup(std::string_view cgroup, std::string_view mounts);

}  // namespace fsdp::device
