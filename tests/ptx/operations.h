// SPDX-License-Identifier: Apache-2.0
// Defines the known operations, by the names that PTX gives them.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "ptx/module.h"

namespace ptx {

// Gives the bytes of a lane of each register that an operation writes and reads. 1 stands for a predicate.
struct Operation {
  Run run = nullptr;
  std::vector<uint8_t> to, from;
};

// Finds an operation of arithmetic, a comparison, a move or a conversion.
std::optional<Operation> find_operation(std::string_view name);

// Finds an access. Its form is in the instruction.
void load(const Instruction &, Warp &);
void store(const Instruction &, Warp &);
void prefetch(const Instruction &, Warp &);  // moves nothing, but the memory must be allocated
std::optional<Run> find_atomic(std::string_view name);

}  // namespace ptx
