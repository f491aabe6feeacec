// SPDX-License-Identifier: Apache-2.0
// A listener whose connections cannot be taken for lack of descriptors stays readable: who polls it would spin. So it
// is left alone for a while.
#pragma once

#include <sys/resource.h>

#include <cerrno>
#include <chrono>
#include <string>

#include "base/error.h"

namespace fsdp::membership {

class AcceptPause {
 public:
  using Clock = std::chrono::steady_clock;
  bool over() const { return Clock::now() >= until_; }
  // accept has failed with this errno. True: it must pause.
  bool note(int code) {
    if (code != EMFILE && code != ENFILE && code != ENOBUFS && code != ENOMEM) return false;
    const auto now = Clock::now();
    if (code_ == 0) since_ = now;
    code_ = code;
    until_ = now + std::chrono::milliseconds(100);
    return true;
  }
  void clear() { code_ = 0; }
  // It has failed all this time.
  bool lasts(Clock::duration time) const { return code_ != 0 && Clock::now() - since_ >= time; }
  // "too many open files: this process may have 1024 (see ulimit -n)"; empty if nothing was wrong.
  std::string problem() const {
    if (code_ == 0) return {};
    rlimit limit{};
    if (code_ != EMFILE || ::getrlimit(RLIMIT_NOFILE, &limit) != 0)
      return code_ == ENFILE ? "too many open files on this host (see /proc/sys/fs/file-max)" : "no memory for sockets";
    return format_text("too many open files: this process may have {} (see ulimit -n)", limit.rlim_cur);
  }

 private:
  Clock::time_point until_{}, since_{};
  int code_ = 0;
};

}  // namespace fsdp::membership
