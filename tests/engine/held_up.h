// SPDX-License-Identifier: Apache-2.0
// Ways to make ranks and threads late: a rank is held up inside a call, between a wait and the work after it; or
// threads of the library stand still wherever they are.
#pragma once

#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "harness.h"

namespace harness {

inline void await(const std::atomic<bool> &flag) {
  for (const double begin = now(); !flag; pause_ms(1)) REQUIRE(now() - begin < 60);
}

// The rank's wait asks a hook, which holds it up. Only one rank at a time can be held up.
struct HeldUp {
  static inline thread_local bool holds_this_thread = false;
  static inline std::atomic<bool> is_held{false};
  static int32_t hook(void *) {
    if (!std::exchange(holds_this_thread, false)) return 0;
    is_held = true;
    pause_ms(150);
    return 0;
  }
  // Call it before the ranks begin.
  static void arm(Scenario &setup) {
    setup.context.interrupted = hook;
    is_held = false;
  }
  // Call it before the call under test: the rank with `held` goes first, and the others follow when it is held up.
  static void enter(bool held) {
    if (held)
      holds_this_thread = true;
    else
      await(is_held);
  }
};

// The library does not block SIGILL on its own threads, so a handler that the test installs can stop them.
class StandStill {
 public:
  // When this returns, all `count` threads of that name stand still, for at most `ms` milliseconds. /proc
  // may still list threads that were joined before. They never run the handler, so they do not count.
  StandStill(const std::string &name, uint32_t count, int ms) {
    arrived = standing_still = 0;
    longest_ms = ms;
    struct sigaction action {};
    action.sa_handler = stand;
    REQUIRE(::sigaction(SIGILL, &action, &before_) == 0);
    std::set<int> asked;
    for (const double begin = now(); arrived < static_cast<int>(count); pause_ms(1)) {
      REQUIRE(now() - begin < 60);
      for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string thread_name;
        std::getline(std::ifstream(task.path() / "comm"), thread_name);
        const int thread = std::stoi(task.path().filename());
        if (thread_name == name && asked.insert(thread).second) (void)::syscall(SYS_tgkill, ::getpid(), thread, SIGILL);
      }
    }
  }
  ~StandStill() {
    while (standing_still > 0) pause_ms(1);
    ::sigaction(SIGILL, &before_, nullptr);
  }
  static bool stands() { return standing_still > 0; }
  StandStill(const StandStill &) = delete;
  StandStill &operator=(const StandStill &) = delete;

 private:
  static void stand(int) {
    const int error = errno;
    ++standing_still;
    ++arrived;
    for (int i = 0; i < longest_ms; ++i) {
      timespec one{0, 1'000'000};
      ::nanosleep(&one, nullptr);
    }
    --standing_still;
    errno = error;
  }
  static inline std::atomic<int> arrived{0}, standing_still{0}, longest_ms{0};
  struct sigaction before_ {};
};

}  // namespace harness
