// SPDX-License-Identifier: Apache-2.0
// What a rank's file says: its boxes of tensors, where they lie, and the sums of its data. It is what PyTorch's
// distributed checkpoint writes and reads; the sums are libfsdp's own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/box.h"
#include "checkpoint/format/safetensors.h"

namespace fsdp::checkpoint {

inline constexpr uint64_t data_alignment = 4096;  // of a file's first data byte

struct ShardTensor {
  std::string name;
  const ElementType *type = nullptr;
  Box box;  // in the whole tensor
};

struct ShardFile {
  SafetensorsHeader header;
  std::vector<uint32_t> order;  // which of the tensors given the header's are
};

// Wide elements come first, else the order is that given: so data starts where its elements want it, and ranks that cut
// the same tensors write them in the same order. Names come once each.
ShardFile plan_shard_file(std::span<const ShardTensor> tensors);
// Length and JSON, data_offset bytes: the same number before the sums are known, when there are none, and after.
std::string write_shard_header(SafetensorsHeader &header, std::span<const uint64_t> sums);

// Where each of a file's tensors lies in the whole one, in the header's order: at the front in a file that does not
// say.
std::vector<std::vector<uint64_t>> saved_offsets(const SafetensorsHeader &header, std::string_view file);
// Of a file of ours; empty: it has none.
std::vector<uint64_t> read_sums(const SafetensorsHeader &header, std::string_view file);

// shard-00001-model-00001-of-00001.safetensors, as PyTorch numbers them
std::string shard_name(uint32_t rank);

}  // namespace fsdp::checkpoint
