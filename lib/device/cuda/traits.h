// SPDX-License-Identifier: Apache-2.0
// Builds without CUDA also know the traits, so that their plans are valid for machines with CUDA.
#pragma once

#include "device/device.h"

namespace fsdp::device {

inline constexpr Traits cuda_traits{.host_memory = false, .graphs = true};

}  // namespace fsdp::device
