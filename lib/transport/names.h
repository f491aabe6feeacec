// SPDX-License-Identifier: Apache-2.0
// Transports build on the membership room, and use its names without its namespace.
#pragma once

#include "membership/job.h"

namespace fsdp::transport {

using namespace membership;

}  // namespace fsdp::transport
