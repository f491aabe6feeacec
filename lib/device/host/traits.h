// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/device.h"

namespace fsdp::device {

inline constexpr Traits host_traits{.host_memory = true, .graphs = false};

}  // namespace fsdp::device
