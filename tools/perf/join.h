// SPDX-License-Identifier: Apache-2.0
// Hosts that join one job, each a process that only says it is a host of its own: the library's rendezvous, tree of
// leaders and exchanges over real sockets of this machine.
#pragma once

#include "perf/request.h"

namespace perf {

// Measures jobs of 2, 8, 32 ... hosts up to request.hosts, and of the largest also which host is named when one is
// killed. Returns the exit status.
int run_join(const Request &request);

}  // namespace perf
