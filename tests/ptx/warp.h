// SPDX-License-Identifier: Apache-2.0
// Up to 32 threads that execute an instruction together, and what they can reach.
#pragma once

#include <bit>
#include <cstring>
#include <vector>

#include "ptx/module.h"

namespace ptx {

// Shared by the threads of a block.
struct Block {
  const Kernel &kernel;
  const std::byte *parameters;
  std::vector<std::byte> shared;
};

struct Warp {
  Block &block;
  std::byte *registers;
  std::byte *local;  // of each lane, one after the other
  Mask active;       // that execute this instruction

  template <class T>
  T *lane(uint32_t at) const {
    return reinterpret_cast<T *>(registers + at);
  }
};

// Calls visit(lane) for those that are set.
template <class Visit>
void each_lane(Mask which, Visit visit) {
  for (; which; which &= which - 1) visit(static_cast<unsigned>(std::countr_zero(which)));
}

// The bytes that an access of one lane means; throws Fault for what is not aligned, or not allocated.
std::byte *reach(const Instruction &access, const Warp &warp, unsigned lane);

// The memory that kernels may touch.
void own(const void *memory, size_t bytes);
void disown(const void *memory);

}  // namespace ptx
