// SPDX-License-Identifier: Apache-2.0
#include "ckpt/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>

#include "base/error.h"

namespace ckpt {
namespace {

volatile std::sig_atomic_t signal_seen = 0;

void note_signal(int number) { signal_seen = number; }

constexpr std::chrono::milliseconds between_lines(200);

}  // namespace

int interrupted_by() { return signal_seen; }

std::string format_bytes(uint64_t bytes) {
  constexpr std::array units = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 999.5 && unit + 1 < units.size(); ++unit) value /= 1000;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.{}f} {}", value, value < 99.95 ? 1 : 0, units[unit]);
}

// The second signal ends the process at once.
ProgressLine::ProgressLine(std::string verb)
    : verb_(std::move(verb)), terminal_(::isatty(STDERR_FILENO) == 1), start_(std::chrono::steady_clock::now()) {
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::sigaction(number, &action, nullptr);
}

ProgressLine::~ProgressLine() {
  if (shown_) fmt::print(stderr, "\r\033[K");
}

void ProgressLine::show(uint64_t done, uint64_t all) {
  if (signal_seen) fsdp::fail(FSDP_INTERRUPTED, "ended by a signal; nothing was left behind");
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ || now - last_ < between_lines) return;
  last_ = now;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double speed = seconds > 0 ? static_cast<double>(done) / seconds : 0;
  fmt::print(stderr, "\r\033[K{} {} of {} ({}%), {}/s", verb_, format_bytes(done), format_bytes(all),
             all ? static_cast<int>(100.0 * static_cast<double>(std::min(done, all)) / static_cast<double>(all)) : 100,
             format_bytes(static_cast<uint64_t>(speed)));
  std::fflush(stderr);
  shown_ = true;
}

}  // namespace ckpt
