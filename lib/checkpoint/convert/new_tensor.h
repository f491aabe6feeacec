// SPDX-License-Identifier: Apache-2.0
// Tensors of files that are to be written, and which elements of stored ones they are made of: by name, or as renames
// say, in either direction. A fused tensor is several pieces, and so is what it is split into again.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/spread_tensor.h"
#include "checkpoint/plan/rename.h"

namespace fsdp::checkpoint {

using SpreadTensors = std::map<std::string, SpreadTensor>;

// A box of a stored tensor that is a box of a new one.
struct TensorPiece {
  std::string name;  // of the stored one
  const SpreadTensor *from = nullptr;
  Box source;               // in the stored tensor
  Box to;                   // in the new one
  bool transposed = false;  // element (r, c) of `source` is element (c, r) of `to`
};

struct NewTensor {
  std::string name;
  const ElementType *type = nullptr;
  std::vector<uint64_t> shape;
  std::vector<TensorPiece> pieces;  // fill it
  std::vector<TensorPiece> twins;   // tied here, one tensor there: they must have the bits of the pieces

  bool turns() const;  // is any of it transposed?
};

// What others' tensors are called here. Refuses, by name, rows that come twice or not at all, and shapes and types that
// do not fit: INVALID_ARGUMENT. The tensors live as long as what is returned.
std::vector<NewTensor> plan_import(const SpreadTensors &theirs, std::span<const Rename> renames);
// The way back: what ours were called there. Of renames without a row_count that go to one tensor of ours, each has
// the rows up to the next one's. `as`: of all that can be converted; NULL: as they are.
std::vector<NewTensor> plan_export(const SpreadTensors &ours, std::span<const Rename> renames,
                                   const ElementType *as = nullptr);

}  // namespace fsdp::checkpoint
