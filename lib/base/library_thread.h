// SPDX-License-Identifier: Apache-2.0
// Threads that the library starts inside a program of others.
#pragma once

#include <pthread.h>

#include <csignal>
#include <cstddef>
#include <string>

namespace fsdp {

// Signals belong to the program's own threads. As long as this object exists, no signal reaches the calling thread.
// Threads that are started during this time, also by other libraries, inherit the mask permanently. Faults are not
// blocked: if a thread blocks its own fault, the kernel ends the process immediately. A handler of a sanitizer or of
// the program, which would have reported the reason, would not run.
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

// From now on the calling thread gives way to other threads on its core: it does not interrupt another thread when it
// wakes, and from Linux 6.12 on a thread that wakes interrupts it soon. It still gets its share of the core. Nothing
// changes if the thread has another policy than SCHED_OTHER, or if the kernel refuses.
void give_way() noexcept;

// A thread that its owner joins.
struct LibraryThread {
  // The small stack is for code of this library. 0 means the system's default, for code of other libraries.
  static constexpr size_t small_stack = size_t{256} * 1024;

  std::string name;     // "fsdp-" and a suffix, cut to the length that the system shows
  std::string purpose;  // for the error: "start the thread of ..."
  size_t stack_bytes = small_stack;

  // The thread handles no signals except its own faults. Throws SYSTEM if it cannot be started.
  pthread_t start(void *(*body)(void *), void *argument) const;
};

}  // namespace fsdp
