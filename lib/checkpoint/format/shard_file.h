// SPDX-License-Identifier: Apache-2.0
// What a rank's file says: its boxes of tensors, where they lie, and the sums of its data. It is what PyTorch's
// distributed checkpoint writes and reads; the sums are libfsdp's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/box.h"
#include "checkpoint/format/safetensors.h"

namespace fsdp::checkpoint {

// A sum for every block of a file's data, so that what was damaged is found, and told to the block, by reading no more
// than is wanted. XXH3 of 64 bits: against accidents, not against people.

// Small enough that a part of a tensor reads little beside it, large enough for few sums: 64 bytes of a header a MiB.
inline constexpr uint64_t block_bytes = uint64_t{256} << 10;

uint64_t block_count(uint64_t data_bytes);
// Sums as text: 16 hexadecimal digits each, whatever they are, so that a header's length is known before them.
std::string format_sums(std::span<const uint64_t> sums);
// Refuses what is not the text of `count` sums.
std::vector<uint64_t> parse_sums(std::string_view text, uint64_t count, std::string_view file);
uint64_t sum_of(std::span<const std::byte> block);
// Of 128 bits, as 32 digits: of a header.
std::string long_sum_of(std::string_view bytes);

// The sums of data that comes in pieces of any size.
class BlockSums {
 public:
  BlockSums();
  ~BlockSums();
  BlockSums(const BlockSums &) = delete;
  BlockSums &operator=(const BlockSums &) = delete;

  void add(std::span<const std::byte> data);
  // No more data comes: the last block may be short.
  std::vector<uint64_t> finish();

 private:
  struct State;  // xxHash's
  std::unique_ptr<State> state_;
  uint64_t in_block_ = 0;
  std::vector<uint64_t> sums_;
};

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
