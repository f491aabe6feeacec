// SPDX-License-Identifier: Apache-2.0
// A stranger that sends datagrams or makes connections without end. It reaches only the driver's own namespaces.
#pragma once

#include <nlohmann/json.hpp>

#include "options.h"

namespace network {

// flood=ADDRESS:PORT,... are the targets, in turn. kind=datagrams|connections; rate counts a second; seconds is the
// duration.
nlohmann::json flood(const Options &options);

}  // namespace network
