// SPDX-License-Identifier: Apache-2.0
#include "perf/scratch.h"

#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

namespace perf {

void fail_file(const std::string &file, const char *deed) {
  throw std::system_error(errno, std::generic_category(), fmt::format("{}: {}", file, deed));
}

Scratch::Scratch(Bench &bench) : bench_(bench) {
  const uint64_t id = bench.lab.sum(bench.rank() == 0 ? static_cast<uint64_t>(::getpid()) : 0);
  path_ = fmt::format("{}/fsdp-perf-{}", bench.request.directory, id);
  if (bench.rank() == 0) std::filesystem::create_directory(path_);
  bench.lab.meet();
}

Scratch::~Scratch() {
  std::error_code ignored;  // what is left says where it is
  if (bench_.rank() == 0) std::filesystem::remove_all(path_, ignored);
}

const char *Scratch::kind() const {
  struct statfs status {};
  if (::statfs(path_.c_str(), &status) != 0) fail_file(path_, "asking for its file system");
  return status.f_type == TMPFS_MAGIC ? "tmpfs" : "disk";
}

}  // namespace perf
