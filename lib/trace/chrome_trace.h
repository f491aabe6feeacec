// SPDX-License-Identifier: Apache-2.0
// A timeline in the Trace Event Format that Perfetto and chrome://tracing read. One event a line between a first and a
// last line that are the same in every file, so that files are merged by joining their lines.
#pragma once

#include <string>

#include "trace/timeline.h"

namespace fsdp::trace {

// The process is the rank, the thread the lane, times are microseconds of CLOCK_MONOTONIC.
std::string format_chrome_trace(const TimelineSnapshot &snapshot, uint32_t rank, uint32_t world_size);

}  // namespace fsdp::trace
