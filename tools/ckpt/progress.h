// SPDX-License-Identifier: Apache-2.0
// A line that shows how far a command is: on a terminal only, on stderr, a few times a second. And the way in which
// SIGINT and SIGTERM end it: between two pieces of work, so that nothing half-made is left.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "checkpoint/convert/convert.h"

namespace ckpt {

class ProgressLine {
 public:
  explicit ProgressLine(std::string verb);
  ~ProgressLine();
  ProgressLine(const ProgressLine &) = delete;
  ProgressLine &operator=(const ProgressLine &) = delete;

  // Throws INTERRUPTED when a signal has come.
  void show(uint64_t done, uint64_t all);
  fsdp::checkpoint::Progress callback() {
    return [this](uint64_t done, uint64_t all) { show(done, all); };
  }

 private:
  std::string verb_;
  bool shown_ = false, terminal_;
  std::chrono::steady_clock::time_point start_, last_;
};

// The signal that ended the command; 0: none.
int interrupted_by();
// 1.5 GB
std::string format_bytes(uint64_t bytes);

}  // namespace ckpt
