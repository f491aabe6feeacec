// SPDX-License-Identifier: Apache-2.0
// The cases of desync_cases.h by a rank of a job on several hosts: a new context for each, in one process.
#pragma once

#include <nlohmann/json.hpp>

#include "options.h"

namespace network {

// options: cases=all or names joined by commas, odd=RANK, late=RANK. The n-th case of the process meets at MASTER_PORT
// + n.
nlohmann::json live_apart(const Options &options);

}  // namespace network
