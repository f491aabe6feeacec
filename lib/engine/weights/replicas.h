// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// Collective over the model: throws MISMATCH, which names the first parameter that ranks store differently.
void check_replicas(Runtime &runtime, fsdp_stream stream);

}  // namespace fsdp::engine
