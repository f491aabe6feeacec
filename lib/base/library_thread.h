// SPDX-License-Identifier: Apache-2.0
// Threads that the library starts inside a program that is not its own.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <string>

namespace fsdp {

// Joined by its owner.
struct LibraryThread {
  // A small stack, for code of our own; 0: the system's, for code of others.
  static constexpr size_t small_stack = size_t{256} * 1024;

  std::string name;     // "fsdp-" and so on, cut to what the system shows
  std::string purpose;  // for the error: "start the thread of ..."
  size_t stack_bytes = small_stack;

  // The thread handles none of the program's signals. Throws SYSTEM.
  pthread_t start(void *(*body)(void *), void *argument) const;
};

}  // namespace fsdp
