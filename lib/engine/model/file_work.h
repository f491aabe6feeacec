// SPDX-License-Identifier: Apache-2.0
// Work of a call on planes in the home file.
#pragma once

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// Runs such work. Its errors are fatal, because some main weights and states may be those of the new step already.
template <class Body>
void run_on_file(Runtime &runtime, const char *call, Body &&body) {
  try {
    body();
  } catch (...) {
    if (!runtime.storage->home_file()) throw;
    Error error = current_error();
    error.message = format_text(
        "{}: rank {}: {}; some weights and states may be those of the new step already, so the context has failed: "
        "make a new one, and load the last checkpoint",
        call, runtime.context.rank(), error.message);
    runtime.context.fail_for_good(error, false);
    throw error;
  }
}

}  // namespace fsdp::engine
