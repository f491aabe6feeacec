// SPDX-License-Identifier: Apache-2.0
// A sum for every block of a file's data, so that what was damaged is found, and told to the block, by reading no more
// than is wanted. XXH3 of 64 bits: against accidents, not against people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::checkpoint {

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

}  // namespace fsdp::checkpoint
