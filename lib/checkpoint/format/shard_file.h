// SPDX-License-Identifier: Apache-2.0
// The header of a rank's file: its boxes of tensors, their places in the file, and the checksums of its data. PyTorch's
// distributed checkpoint writes and reads the same format; the checksums are libfsdp's own.
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

// Each block of a file's data has a checksum, so that a damaged block is found when it is read, and only the wanted
// blocks are read. The checksum is XXH3 of 64 bits, which protects against accidents and not against attackers. Blocks
// are small, so that a read of a part of a tensor reads little more than the part. They are large enough for few
// checksums: 64 bytes of header per MiB.
inline constexpr uint64_t block_bytes = uint64_t{256} << 10;

uint64_t block_count(uint64_t data_bytes);
// Formats checksums as text with 16 hexadecimal digits for each, so the length of a header is known before the
// checksums are.
std::string format_sums(std::span<const uint64_t> sums);
// Throws if the text does not have `count` checksums.
std::vector<uint64_t> parse_sums(std::string_view text, uint64_t count, std::string_view file);
uint64_t sum_of(std::span<const std::byte> block);
// The checksum of a header, of 128 bits, as 32 digits.
std::string long_sum_of(std::string_view bytes);

// Computes the checksums of data that arrives in pieces of any size.
class BlockSums {
 public:
  BlockSums();
  ~BlockSums();
  BlockSums(const BlockSums &) = delete;
  BlockSums &operator=(const BlockSums &) = delete;

  void add(std::span<const std::byte> data);
  // Must be called after the last data, because the last block may be short.
  std::vector<uint64_t> finish();

 private:
  struct State;  // the state of xxHash
  std::unique_ptr<State> state_;
  uint64_t in_block_ = 0;
  std::vector<uint64_t> sums_;
};

inline constexpr uint64_t data_alignment = 4096;  // alignment of a file's first data byte

struct ShardTensor {
  std::string name;
  const ElementType *type = nullptr;
  Box box;  // box in the whole tensor
};
struct ShardFile {
  SafetensorsHeader header;
  std::vector<uint32_t> order;  // for each tensor of the header, its index in the list passed to plan_shard_file()
};
// Wide elements come first; otherwise the given order is kept. So data is aligned to its elements, and ranks that
// divide the same tensors write them in the same order. Each name may come only once.
ShardFile plan_shard_file(std::span<const ShardTensor> tensors);
// Returns length and JSON, in total data_offset bytes. The length does not depend on the checksums.
std::string write_shard_header(SafetensorsHeader &header, std::span<const uint64_t> sums);

// For each of a file's tensors, in the header's order, its offset in the whole tensor. The offset is 0 in a file
// without offsets.
std::vector<std::vector<uint64_t>> saved_offsets(const SafetensorsHeader &header, std::string_view file);
// The checksums of one of our files; empty if it has none.
std::vector<uint64_t> read_sums(const SafetensorsHeader &header, std::string_view file);

// Returns "shard-00001-model-00001-of-00001.safetensors", with PyTorch's numbering; `number` counts the rank's files.
std::string shard_name(uint32_t rank, uint32_t number = 0);

}  // namespace fsdp::checkpoint
