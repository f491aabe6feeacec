// SPDX-License-Identifier: Apache-2.0
// Threads that the library starts inside a program that is not its own.
#pragma once

#include <pthread.h>

#include <csignal>
#include <cstddef>
#include <string>

namespace fsdp {

// Signals belong to the program's own threads. While this lives none reaches the calling thread, nor ever one of those
// that it starts, which inherit that: also those of libraries that this one calls. But a fault is the faulting thread's
// own: where it is blocked the kernel ends the process at once, without the handler of a sanitizer or of the program
// that would have told why.
class BlockedSignals {
 public:
  BlockedSignals() noexcept {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals &) = delete;
  BlockedSignals &operator=(const BlockedSignals &) = delete;

 private:
  sigset_t before_;
};

// Joined by its owner.
struct LibraryThread {
  // A small stack, for code of our own; 0: the system's, for code of others.
  static constexpr size_t small_stack = size_t{256} * 1024;

  std::string name;     // "fsdp-" and so on, cut to what the system shows
  std::string purpose;  // for the error: "start the thread of ..."
  size_t stack_bytes = small_stack;

  // The thread handles none of the program's signals but its own faults. Throws SYSTEM.
  pthread_t start(void *(*body)(void *), void *argument) const;
};

}  // namespace fsdp
