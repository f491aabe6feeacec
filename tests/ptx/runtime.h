// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's runtime that a launch needs. The code that nvcc made from the library's launches calls it, and it
// runs the PTX.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ptx/module.h"

namespace ptx {

// From now on, launches run the kernels of this text.
void use(Module module);

// Returns the kernels that use() was given and that no launch has run.
std::vector<std::string> idle_kernels();
size_t kernel_count();

// Returns the number of atomic operations by threads since the previous call.
uint64_t take_atomics();
// Returns the number of accesses of single threads to global memory since the previous call, by their bytes.
struct Accesses {
  std::map<unsigned, uint64_t> loads, stores;
};
Accesses take_accesses();
// Returns the addresses that threads have prefetched since the previous call.
uint64_t take_prefetches();

// Returns the faults of the launches since the previous call; empty if there were none.
std::string take_fault();

}  // namespace ptx
