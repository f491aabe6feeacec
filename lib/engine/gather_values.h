// SPDX-License-Identifier: Apache-2.0
// Numbers about a model that every rank which holds slots has some of (shares of a norm, amaxes), on a device: they
// travel on the streams of the library, and no thread waits for them.
#pragma once

#include "engine/runtime.h"

namespace fsdp::engine {

// of: what they are, for traces. event: reusable; between the two axes.
struct ValuesGather {
  Traced of;
  transport::Part from;  // each inner rank's piece
  std::byte *whole;      // all pieces, in the order of the ranks that hold slots
  uint64_t bytes;        // of a piece
  device::Event &event;
};

// Behind what the caller's stream was given. Returns the stream on which all of them are there.
device::Stream &gather_values(Runtime &runtime, const ValuesGather &gather, device::Stream &caller);

}  // namespace fsdp::engine
