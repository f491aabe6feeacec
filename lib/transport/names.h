// SPDX-License-Identifier: Apache-2.0
// Transports are built on the room of membership and write its names without the room's.
#pragma once

#include "membership/job.h"

namespace fsdp::transport {

using namespace membership;

}  // namespace fsdp::transport
