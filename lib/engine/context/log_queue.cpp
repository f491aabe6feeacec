// SPDX-License-Identifier: Apache-2.0
#include "engine/context/log_queue.h"

namespace fsdp::engine {
namespace {

constexpr size_t most_lines = 1024;

}  // namespace

void LogQueue::add(fsdp_log_level level, const std::string &message) noexcept {
  if (!takes(level)) return;
  try {
    const std::lock_guard lock(mutex_);
    if (lines_.size() < most_lines) lines_.emplace_back(level, message);
    has_lines_.store(true, std::memory_order_release);
  } catch (...) {  // a lost line is better than a failed step
  }
}

void LogQueue::flush() noexcept {
  if (!has_lines_.load(std::memory_order_acquire)) return;
  std::vector<std::pair<fsdp_log_level, std::string>> lines;
  {
    const std::lock_guard lock(mutex_);
    lines.swap(lines_);
    has_lines_.store(false, std::memory_order_release);
  }
  for (const auto &[level, message] : lines) hook_(data_, level, message.c_str());
}

}  // namespace fsdp::engine
