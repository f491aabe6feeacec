// SPDX-License-Identifier: Apache-2.0
// Up to 32 threads that execute an instruction together, and the memory that they can access.
#pragma once

#include <bit>
#include <cstring>
#include <vector>

#include "ptx/module.h"

namespace ptx {

// The threads of a block share this memory.
struct Block {
  const Kernel &kernel;
  const std::byte *parameters;
  std::vector<std::byte> shared;
};

struct Warp {
  Block &block;
  std::byte *registers;
  std::byte *local;  // the lanes of each register, one after the other
  Mask active;       // lanes that execute this instruction

  template <class T>
  T *lane(uint32_t at) const {
    return reinterpret_cast<T *>(registers + at);
  }
};

// Calls visit(lane) for each set bit.
template <class Visit>
void each_lane(Mask which, Visit visit) {
  for (; which; which &= which - 1) visit(static_cast<unsigned>(std::countr_zero(which)));
}

// Returns the bytes that an access of one lane means. Throws Fault if they are not aligned or not allocated.
std::byte *reach(const Instruction &access, const Warp &warp, unsigned lane);

// Sets the memory that kernels may access.
void own(const void *memory, size_t bytes);
void disown(const void *memory);

}  // namespace ptx
