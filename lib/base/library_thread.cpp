// SPDX-License-Identifier: Apache-2.0
#include "base/library_thread.h"

#include <unistd.h>

#include <algorithm>

#include "base/error.h"

namespace fsdp {

pthread_t LibraryThread::start(void *(*body)(void *), void *argument) const {
  constexpr size_t max_shown = 15;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  // glibc takes a thread's TLS from the thread's stack, and the TLS is large in programs with many libraries.
  const long least = std::max(sysconf(_SC_THREAD_STACK_MIN), 0L);
  if (stack_bytes) pthread_attr_setstacksize(&attributes, static_cast<size_t>(least) + stack_bytes);
  pthread_t thread{};
  const int code = [&] {
    const BlockedSignals blocked;
    return pthread_create(&thread, &attributes, body, argument);
  }();
  pthread_attr_destroy(&attributes);
  if (code != 0) fail_errno(code, format_text("start the thread of {}", purpose));
  pthread_setname_np(thread, name.substr(0, max_shown).c_str());
  return thread;
}

}  // namespace fsdp
