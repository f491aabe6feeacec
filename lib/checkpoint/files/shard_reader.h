// SPDX-License-Identifier: Apache-2.0
// Takes boxes of tensors out of a safetensors file: the blocks that contain them are read once each, and verified where
// the file has sums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "checkpoint/files/file.h"
#include "checkpoint/format/box.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/shard_file.h"

namespace fsdp::checkpoint {

// Elements of a box, as the file has them: `to` is the first one's place where the box is kept.
using TakeElements = std::function<void(uint32_t wanted, uint64_t to, std::span<const std::byte> elements)>;

class ShardReader {
 public:
  // Blocks that are read at once.
  static constexpr uint64_t chunk_bytes = uint64_t{4} << 20;
  // Memory that read() needs: the next chunk is read while one is taken.
  static constexpr uint64_t half_bytes = chunk_bytes + 2 * io_alignment;
  static constexpr uint64_t buffer_bytes = 2 * half_bytes;

  // Reads and checks the header. INVALID_ARGUMENT, naming the file, where it is damaged.
  ShardReader(int folder, const std::string &name, std::string shown, LinkPolicy links = LinkPolicy::refused);

  const SafetensorsHeader &header() const { return header_; }
  const std::string &shown() const { return file_.shown(); }
  // INVALID_ARGUMENT, naming the file, where it does not have all of a box.
  void check_has(const WantedBox &wanted) const;
  uint64_t file_bytes() const { return file_.bytes(); }
  // As a manifest has it.
  const std::string &header_sum() const { return header_sum_; }
  // Where each tensor lies in the whole one.
  const std::vector<std::vector<uint64_t>> &offsets() const { return offsets_; }

  struct Counts {
    uint64_t wanted = 0, read = 0;  // bytes
  };
  // Boxes in the order of the header's tensors, and those of one tensor in the order of its rows. INVALID_ARGUMENT,
  // naming the file, where it does not have all of a box; INVALID_ARGUMENT, naming file, tensor and bytes, where a
  // block is not what was written; then some has been taken already.
  Counts read(std::span<const WantedBox> wanted, std::span<std::byte> buffer, const TakeElements &take) const;
  // All blocks, without taking anything. What differs from its sum, or cannot be read, is an error as above; given
  // `damaged`, it is told of each such block, and the others are read all the same. `passed`: so many bytes have been.
  uint64_t verify(std::span<std::byte> buffer, const std::function<void(const Error &)> &damaged = {},
                  const std::function<void(uint64_t bytes)> &passed = {}) const;

 private:
  class ReadAhead;
  void verify_chunk(const ByteRange &chunk, std::span<std::byte> buffer,
                    const std::function<void(const Error &)> &damaged) const;
  void check_sums(const ByteRange &range, std::span<const std::byte> bytes) const;
  std::span<const std::byte> read_blocks(const ByteRange &range, std::span<std::byte> buffer) const;
  [[noreturn]] void refuse_block(const ByteRange &block) const;
  void check_order(const WantedRuns &runs) const;

  InFile file_;
  SafetensorsHeader header_;
  std::string header_sum_;
  std::vector<std::vector<uint64_t>> offsets_;
  std::vector<uint64_t> sums_;  // empty: the file has none
};

}  // namespace fsdp::checkpoint
