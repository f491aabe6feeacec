// SPDX-License-Identifier: Apache-2.0
// The bytes of one collective: its chunks, the rank to which each chunk belongs, and where the chunks lie. Pure
// arithmetic.
//
// Every piece is cut into one slice per rank, and each slice into chunks; chunks c of all slices belong together. In
// the reduce stage rank r sends to each rank chunk c of that rank's slice, and each rank sums the chunks that it
// receives. In the gather stage rank r sends chunk c of its own slice to all ranks.
#pragma once

#include <vector>

#include "transport/call/launch.h"
#include "transport/message/channel/transport.h"

namespace fsdp::transport::messages {

struct ByteSpan {
  std::byte *data;
  uint64_t bytes;
};

class Call {
 public:
  // `chunk_bytes` is the size of the largest chunk, a multiple of 64.
  void start(const Launch &launch, uint32_t rank, uint32_t ranks, uint64_t chunk_bytes);
  const Launch &launch() const noexcept { return *launch_; }
  uint64_t chunks() const noexcept { return chunks_; }
  bool reduces() const noexcept;
  // The number of chunks that rank r sends to each other rank in the gather stage.
  uint64_t gathered_from(uint32_t r) const noexcept;
  // This rank's memory of chunk `chunk` of rank r's slice.
  ByteSpan slice(uint32_t r, uint64_t chunk) const noexcept;
  // Copies this rank's part of a gather to its place, unless it is there already.
  static void place_own(const Launch &launch, uint32_t rank) noexcept;
  // Where the sum of this rank's slice goes. `accumulate` says whether the sum is added to the values there.
  ByteSpan sum(uint64_t chunk, bool &accumulate) const noexcept;

 private:
  struct Cut {
    const Piece *piece;
    uint64_t offset, bytes;  // offset and length of the chunk in the slice
  };
  uint64_t slice_bytes(const Piece &piece) const noexcept;
  std::pair<uint64_t, uint64_t> bounds(const Piece &piece, uint32_t r) const noexcept;
  Cut cut(uint32_t r, uint64_t chunk) const noexcept;
  Operation operation() const noexcept { return launch_->operation; }

  const Launch *launch_ = nullptr;
  uint32_t rank_ = 0, ranks_ = 1;
  uint64_t chunk_bytes_ = 64, chunks_ = 0;
  std::vector<uint64_t> first_;  // first chunk of each piece
};

}  // namespace fsdp::transport::messages
