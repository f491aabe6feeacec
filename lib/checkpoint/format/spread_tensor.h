// SPDX-License-Identifier: Apache-2.0
// Tensors that are in files of weights, each of them in one box or in several, whoever cut it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/format/box.h"
#include "checkpoint/format/element_type.h"

namespace fsdp::checkpoint {

// What is in one file: boxes of tensors.
struct StoredBox {
  std::string name;
  const ElementType *type;
  Box box;
  std::vector<uint64_t> shape = {};  // of the tensor, whose other boxes may not be there; empty: all of them are
  std::string unknown_type = {};     // as in StoredTensor
};
struct StoredFile {
  std::vector<StoredBox> boxes;
};

// A tensor, in however many boxes.
struct SpreadTensor {
  const ElementType *type = nullptr;
  std::vector<uint64_t> shape;
  std::vector<std::pair<uint32_t, const Box *>> boxes;  // in which file
  bool may_lack = false;                                // boxes of it, which others have
  std::string unknown_type = {};                        // as in StoredTensor

  std::string_view type_name() const { return is_known(*type) ? type->name : unknown_type; }
};

// By name. Refuses boxes that overlap, that are not all of their tensor or that differ in what they are of:
// INVALID_ARGUMENT. The files live as long as what is returned.
std::map<std::string, SpreadTensor> collect_tensors(std::span<const StoredFile> files);

// All dimensions but the first are a row; a scalar is one.
inline uint64_t rows_of(std::span<const uint64_t> shape) { return shape.empty() ? 1 : shape[0]; }

}  // namespace fsdp::checkpoint
