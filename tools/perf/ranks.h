// SPDX-License-Identifier: Apache-2.0
// The ranks of a measurement: processes forked from this one, or its threads.
#pragma once

#include "perf/bench.h"

namespace perf {

// Runs the operations on all ranks and returns what rank 0 reported; an exit status other than 0 if a rank failed.
// Nothing of the library may exist in this process before.
int run_ranks(const Request &request, Peers *peers);

}  // namespace perf
