// SPDX-License-Identifier: Apache-2.0
// Reads boxes of tensors from a safetensors file. Each block that contains a part of them is read once, and verified if
// the file has checksums.
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

// Takes elements of a box, in the file's format. `to` is the position of the first element in the box that is kept.
using TakeElements = std::function<void(uint32_t wanted, uint64_t to, std::span<const std::byte> elements)>;

class ShardReader {
 public:
  // Size of a chunk: the blocks that are read at once.
  static constexpr uint64_t chunk_bytes = uint64_t{4} << 20;
  // Half of the memory that read() needs: one chunk is read while the previous one is taken.
  static constexpr uint64_t half_bytes = chunk_bytes + 2 * io_alignment;
  static constexpr uint64_t buffer_bytes = 2 * half_bytes;

  // Reads and checks the header. Throws INVALID_ARGUMENT, with the file's name, if it is damaged.
  ShardReader(int folder, const std::string &name, std::string shown, LinkPolicy links = LinkPolicy::refused);

  const SafetensorsHeader &header() const { return header_; }
  const std::string &shown() const { return file_.shown(); }
  // Throws INVALID_ARGUMENT, with the file's name, if the file lacks a part of the box.
  void check_has(const WantedBox &wanted) const;
  uint64_t file_bytes() const { return file_.bytes(); }
  // The checksum of the header, as the manifest stores it.
  const std::string &header_sum() const { return header_sum_; }
  // For each tensor of the file, its offset in the whole tensor.
  const std::vector<std::vector<uint64_t>> &offsets() const { return offsets_; }

  struct Counts {
    uint64_t wanted = 0, read = 0;  // numbers of bytes
  };
  // Reads boxes. They must be in the order of the header's tensors, and the boxes of one tensor in the order of its
  // rows. Throws INVALID_ARGUMENT, with the file's name, if the file lacks a part of a box. Throws INVALID_ARGUMENT,
  // with file, tensor and bytes, if a block was changed; some elements may then have been taken already.
  Counts read(std::span<const WantedBox> wanted, std::span<std::byte> buffer, const TakeElements &take) const;
  // Reads all blocks without taking elements. Throws as read() does if a block differs from its checksum or cannot be
  // read. If `damaged` is not empty, it is called for each such block instead, and the other blocks are still read.
  // `passed` gets the number of bytes read so far.
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
  std::vector<uint64_t> sums_;  // empty: the file has no checksums
};

}  // namespace fsdp::checkpoint
