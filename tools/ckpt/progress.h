// SPDX-License-Identifier: Apache-2.0
// Shows on stderr how far a command is, a few times a second, if stderr is a terminal. SIGINT and SIGTERM end the
// command between two blocks of work, so that nothing half-made is left.
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
