// SPDX-License-Identifier: Apache-2.0
// Measures how hosts join one job. Each host is a process that claims to be a host of its own; the library's
// rendezvous, tree of leaders and exchanges use real sockets of this machine.
#pragma once

#include "perf/request.h"

namespace perf {

// Measures jobs of 2, 8, 32 ... hosts up to request.hosts, and in the largest job also kills a host and checks which
// host is named. Returns the exit status.
int run_join(const Request &request);

}  // namespace perf
