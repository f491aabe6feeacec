// SPDX-License-Identifier: Apache-2.0
// Lines for the caller's log hook. Any thread adds lines; they are passed to the hook on the caller's thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fsdp.h"

namespace fsdp::engine {

class LogQueue {
 public:
  LogQueue(fsdp_log_hook hook, void *data, fsdp_log_level level) : hook_(hook), data_(data), level_(level) {}
  bool takes(fsdp_log_level level) const noexcept { return hook_ && level <= level_; }
  // A line is lost if there is no memory for it, or if too many lines wait.
  void add(fsdp_log_level level, const std::string &message) noexcept {
    if (!takes(level)) return;
    try {
      const std::lock_guard lock(mutex_);
      if (lines_.size() < max_lines) lines_.emplace_back(level, message);
      has_lines_.store(true, std::memory_order_release);
    } catch (...) {  // losing a line is better than failing a step
    }
  }
  void flush() noexcept {
    if (!has_lines_.load(std::memory_order_acquire)) return;
    std::vector<std::pair<fsdp_log_level, std::string>> lines;
    {
      const std::lock_guard lock(mutex_);
      lines.swap(lines_);
      has_lines_.store(false, std::memory_order_release);
    }
    for (const auto &[level, message] : lines) hook_(data_, level, message.c_str());
  }

 private:
  static constexpr size_t max_lines = 1024;
  const fsdp_log_hook hook_;
  void *const data_;
  const fsdp_log_level level_;
  std::mutex mutex_;
  std::vector<std::pair<fsdp_log_level, std::string>> lines_;
  std::atomic<bool> has_lines_{false};
};

}  // namespace fsdp::engine
