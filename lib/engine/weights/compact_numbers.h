// SPDX-License-Identifier: Apache-2.0
// Numbers that are stored in two planes, with fewer bits than fp32: main weights as compute weights and rests, and
// AdamW's states as codes and scales. Calls and checkpoints read and write them as fp32.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "engine/runtime/runtime.h"
#include "memory/plane.h"

namespace fsdp::engine {

// The numbers of this rank's part of one parameter. `first` is the first element of a piece, counted from the start of
// the part. A piece of codes begins at the start of a block, and ends at the end of a block or of the part. Only the
// constructor allocates.
class CompactNumbers {
 public:
  // Are the numbers of the plane kept in two planes?
  static bool has(const Bucket &bucket, const Plane &plane);
  // Requires has(). Pieces of more than `longest` elements are converted in several steps.
  CompactNumbers(Runtime &runtime, const Bucket &bucket, const Plane &plane, uint32_t tensor, uint64_t longest);

  uint64_t count() const { return slice_.count; }
  // Copies bytes of the planes to memory of the host.
  using CopyOut = std::function<void(const std::byte *from, std::span<std::byte> to)>;
  void read(uint64_t first, std::span<float> to, const CopyOut &copy);
  // Like read(), for bytes [first_byte, first_byte + to.size()) of the fp32 numbers. The range may begin and end within
  // a number.
  void read_bytes(uint64_t first_byte, std::span<std::byte> to, const CopyOut &copy);
  void write(uint64_t first, std::span<const float> from);
  // Like read(), with numbers of another dtype in the caller's memory.
  void read_as(uint64_t first, uint64_t count, std::byte *to, fsdp_dtype dtype);
  void write_from(uint64_t first, uint64_t count, const std::byte *from, fsdp_dtype dtype);

 private:
  enum class Form : uint8_t { split, signed_codes, unsigned_codes };
  void read_split(uint64_t first, std::span<float> to, const CopyOut &copy);
  void read_codes(uint64_t first, std::span<float> to, const CopyOut &copy);
  void write_split(uint64_t first, std::span<const float> from);
  void write_codes(uint64_t first, std::span<const float> from);
  // The address of element `index` of this rank's part: at() in the first plane, second_at() in the second plane.
  std::byte *at(uint64_t index) const { return plane_->at(slice_) + index * dtype_size(plane_->dtype()); }
  std::byte *second_at(uint64_t index) const { return second_->at(of_second_) + index * dtype_size(second_->dtype()); }

  const Storage *storage_;
  Form form_;
  const Plane *plane_, *second_;     // compute weights and rests, or codes and scales
  layout::Slice slice_, of_second_;  // this rank's part of each plane
  // A piece of each plane, and the numbers of this piece.
  std::vector<std::byte> first_piece_, second_piece_;
  std::vector<float> numbers_;
};

// Encodes the numbers of states, which a load reads in any order. The scale of a block depends on all numbers of the
// block. So a block that is read in several pieces is kept until its last piece has arrived.
class StateEncoder {
 public:
  // `key` identifies the tensor within a load.
  void add(const void *key, CompactNumbers &numbers, uint64_t first, std::span<const float> from);
  void clear() { cut_.clear(); }

 private:
  struct CutBlock {
    const void *key;
    uint64_t block, given = 0;
    std::array<float, memory::coded_block> numbers = {};
  };
  void add_to_cut(const void *key, CompactNumbers &numbers, uint64_t first, std::span<const float> from);
  std::vector<CutBlock> cut_;
};

}  // namespace fsdp::engine
