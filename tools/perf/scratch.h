// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "perf/bench.h"

namespace perf {

// Throws what errno says of a file, and what was done to it.
[[noreturn]] void fail_file(const std::string &file, const char *deed);

// A folder of this run inside the requested one; it is removed with its contents. Collective.
class Scratch {
 public:
  explicit Scratch(Bench &bench);
  ~Scratch();
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  std::string file(const std::string &name) const { return path_ + "/" + name; }
  // The figures say whether the files were on a disk or in memory.
  const char *kind() const;

 private:
  Bench &bench_;
  std::string path_;
};

}  // namespace perf
