// SPDX-License-Identifier: Apache-2.0
// A stranger that sends datagrams or makes connections without end. It reaches only the driver's own namespaces.
#pragma once

#include <nlohmann/json.hpp>

#include "options.h"

namespace network {

// flood=ADDRESS:PORT,...: where to, in turn. kind=datagrams|connections, rate: a second, seconds.
nlohmann::json flood(const Options &options);

}  // namespace network
