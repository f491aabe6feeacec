// SPDX-License-Identifier: Apache-2.0
// What each visit of a pass gathers ahead, and from when to when that keeps each visit's weights gathered. Inside the
// memory room only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "memory/visit_order.h"

namespace fsdp::memory {

inline constexpr uint32_t never = UINT32_MAX;  // of a position

struct PrefetchWindow {
  std::vector<std::vector<uint32_t>> ahead;  // for each position: positions to gather ahead, nearest first
  std::vector<uint32_t> begins;              // for each position: the position from which on its group is gathered
};

// `visits` is one chain: the passes do not overlap. resident_from[group] is the position of the visit after which a
// resident group stays gathered, UINT32_MAX if it does not.
PrefetchWindow open_windows(std::span<const fsdp_visit> visits, const ScheduleSpec &spec,
                            std::span<const uint32_t> resident_from);

}  // namespace fsdp::memory
