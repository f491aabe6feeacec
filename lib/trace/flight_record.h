// SPDX-License-Identifier: Apache-2.0
// A flight recorder's content as the file that fsdp-info flight reads: JSON, one entry a line.
// docs/guides/debugging-a-hang.md says what is in it.
#pragma once

#include <optional>
#include <string>

#include "base/error.h"
#include "trace/flight.h"

namespace fsdp::trace {

// Whose it is. No secret is among it, nor any argument or variable of the process.
struct FlightOwner {
  uint32_t rank = 0, world_size = 1;
  std::optional<Error> error;  // what failed the context
};

std::string format_flight_record(const FlightRecorder::FlightSnapshot &snapshot, const FlightOwner &owner);

}  // namespace fsdp::trace
