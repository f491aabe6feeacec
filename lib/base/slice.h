// SPDX-License-Identifier: Apache-2.0
// How long a wait sleeps before it looks again whether it should go on.
#pragma once

#include <cstdint>

namespace fsdp {

inline constexpr int slice_ms = 20;

// Of waits for all ranks of a job of so many. What is waited for wakes them; a look finds what does not, a verdict or
// the caller's wish to end. Where thousands of processes share a machine, their looks would take all of it.
constexpr int slice_ms_of(uint32_t ranks) {
  return ranks <= 512 ? slice_ms : ranks <= 2048 ? 5 * slice_ms : 10 * slice_ms;
}

}  // namespace fsdp
