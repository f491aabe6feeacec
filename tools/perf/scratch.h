// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "perf/bench.h"

namespace perf {

// Throws what errno says of a file, and what was done to it.
[[noreturn]] void fail_file(const std::string &file, const char *deed);

// A folder of this run in the one that was asked for; removed with all that is in it. Collective.
class Scratch {
 public:
  explicit Scratch(Bench &bench);
  ~Scratch();
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  std::string file(const std::string &name) const { return path_ + "/" + name; }
  // Memory is no disk: the figures say which it was.
  const char *kind() const;

 private:
  Bench &bench_;
  std::string path_;
};

}  // namespace perf
