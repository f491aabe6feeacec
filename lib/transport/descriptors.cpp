// SPDX-License-Identifier: Apache-2.0
#include "transport/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/error.h"

namespace fsdp::transport {

Descriptors count_descriptors() {
  Descriptors count;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) fail_errno(errno, "getrlimit of descriptors");
  count.limit = static_cast<uint32_t>(std::min<rlim_t>(limit.rlim_cur, UINT32_MAX));
  const std::unique_ptr<DIR, int (*)(DIR *)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (!folder) {  // without /proc only the limit is known; or no descriptor is left for the folder
    if (errno == EMFILE || errno == ENFILE) count.open = count.limit;
    return count;
  }
  while (::readdir(folder.get())) ++count.open;
  count.open -= std::min(count.open, 3U);  // ".", ".." and the folder
  return count;
}

uint64_t DescriptorNeed::all() const noexcept { return uint64_t{control} + messages + spare_descriptors; }

std::string find_shortage(const Descriptors &has, const DescriptorNeed &need) {
  if (has.open + need.all() <= has.limit) return {};
  return format_text(
      "it needs {} more descriptors ({} for connections to the leaders of other hosts, {} for messages to ranks of "
      "other hosts, {} to spare), but its process may have {} and has {}: raise the limit to {} or more (ulimit -n; "
      "systemd: LimitNOFILE=; containers: --ulimit nofile=)",
      need.all(), need.control, need.messages, spare_descriptors, has.limit, has.open, has.open + need.all());
}

}  // namespace fsdp::transport
