// SPDX-License-Identifier: Apache-2.0
// The time that limits are counted in.
#pragma once

#include <chrono>
#include <cstdint>

namespace fsdp {

inline uint64_t steady_ms() noexcept {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

}  // namespace fsdp
