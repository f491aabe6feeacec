// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ptx/module.h"

namespace ptx {

// Runs all blocks, one after the other. Threads go by warps, in step where they do the same. In kernels with shared
// memory each thread goes alone up to a barrier, from the first thread on in one block and from the last in the next,
// so that a missing barrier shows. arguments has a pointer to each parameter. Throws Fault.
void run_kernel(const Kernel &kernel, uint32_t blocks, uint32_t threads, void *const *arguments);

}  // namespace ptx
