// SPDX-License-Identifier: Apache-2.0
// Makes the bytes of test files, and returns the message of a failed operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "alone.h"
#include "base/error.h"

namespace fsdp::checkpoint::test_bytes {

FSDP_TEST_ALONE inline void fill_random(std::byte *to, uint64_t count, uint64_t state) {
  for (uint64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005 + 1442695040888963407;
    to[i] = static_cast<std::byte>(state >> 56);
  }
}

// Returns "" if the operation did not fail.
inline std::string message_of(const std::function<void()> &body) {
  try {
    body();
  } catch (const Error &error) {
    return error.message;
  }
  return "";
}

}  // namespace fsdp::checkpoint::test_bytes
