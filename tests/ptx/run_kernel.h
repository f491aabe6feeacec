// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ptx/module.h"

namespace ptx {

// All blocks, one after the other. Threads go by warps, in step where they do the same. Where they share memory each
// goes alone up to a barrier, the first thread first, in the next block the last: a barrier that is missing is not made
// up for. arguments: a pointer to each parameter. Throws Fault.
void run_kernel(const Kernel &kernel, uint32_t blocks, uint32_t threads, void *const *arguments);

}  // namespace ptx
