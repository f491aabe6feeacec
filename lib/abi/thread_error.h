// SPDX-License-Identifier: Apache-2.0
// The last error of calls on the calling thread. It is a key of POSIX threads and not a thread_local object. If memory
// runs out, a key reports that, but registering the destructor of a thread_local object ends the process.
#pragma once

#include <pthread.h>

#include <memory>
#include <new>
#include <optional>

#include "base/error.h"

namespace fsdp::abi {

struct ThreadError {
  std::optional<Error> error;
  bool failed_context = false;
};

class ThreadErrors {
 public:
  ThreadErrors() noexcept : made_(pthread_key_create(&key_, end) == 0) {}
  ~ThreadErrors() {
    if (!made_) return;
    end(find());
    pthread_key_delete(key_);
    made_ = false;  // exit handlers that run later find no error, and not another library's value under the same key
  }
  ThreadErrors(const ThreadErrors &) = delete;
  ThreadErrors &operator=(const ThreadErrors &) = delete;

  // Returns NULL if this thread has had no error, or if there was no memory for it.
  ThreadError *find() const noexcept { return made_ ? static_cast<ThreadError *>(pthread_getspecific(key_)) : nullptr; }
  // Returns this thread's error, which is made if need be. Throws std::bad_alloc.
  ThreadError &get() const {
    if (ThreadError *found = find()) return *found;
    auto fresh = std::make_unique<ThreadError>();
    if (!made_ || pthread_setspecific(key_, fresh.get()) != 0) throw std::bad_alloc();
    return *fresh.release();
  }

 private:
  static void end(void *error) noexcept { delete static_cast<ThreadError *>(error); }

  pthread_key_t key_{};
  bool made_;
};

}  // namespace fsdp::abi
