// SPDX-License-Identifier: Apache-2.0
// CUDA's runtime, as far as a launch needs it: the code that nvcc made of the library's launches calls it, and PTX
// runs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ptx/module.h"

namespace ptx {

// What launches run from now on.
void use(Module module);

// Kernels that use() was given and no launch has run.
std::vector<std::string> idle_kernels();
size_t kernel_count();

// Atomic operations of threads since it was asked for last.
uint64_t take_atomics();
// The accesses of single threads to global memory since it was asked for last, by their bytes.
struct Accesses {
  std::map<unsigned, uint64_t> loads, stores;
};
Accesses take_accesses();
// Addresses that threads have fetched ahead, likewise.
uint64_t take_prefetches();

// What was wrong with the launches since it was asked for last; empty: nothing.
std::string take_fault();

}  // namespace ptx
