// SPDX-License-Identifier: Apache-2.0
// Known in builds without CUDA too, so that their plans are true of machines that have it.
#pragma once

#include "device/device.h"

namespace fsdp::device {

inline constexpr Traits cuda_traits{.host_memory = false, .graphs = true};

}  // namespace fsdp::device
