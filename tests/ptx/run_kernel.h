// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ptx/module.h"

namespace ptx {

// Runs all blocks, one after the other. Threads run by warps, and in step while they do the same. Throws Fault.
// `arguments` has a pointer to each parameter. In kernels with shared memory each thread runs alone up to a barrier, in
// ascending order in one block and descending order in the next, so that a missing barrier shows.
void run_kernel(const Kernel &kernel, uint32_t blocks, uint32_t threads, void *const *arguments);

}  // namespace ptx
