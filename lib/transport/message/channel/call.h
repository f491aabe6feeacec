// SPDX-License-Identifier: Apache-2.0
// One collective's bytes: which chunks there are, which rank each belongs to, and where they lie. Pure arithmetic.
//
// Every piece is cut into one slice a rank, and slices into chunks; chunk c of all slices belong together. In the
// reduce stage rank r sends each rank chunk c of that rank's slice, and each sums what has come. In the gather stage
// rank r sends chunk c of its own slice to all ranks.
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
  // chunk_bytes: of the largest chunk, a multiple of 64.
  void start(const Launch &launch, uint32_t rank, uint32_t ranks, uint64_t chunk_bytes);
  const Launch &launch() const noexcept { return *launch_; }
  uint64_t chunks() const noexcept { return chunks_; }
  bool reduces() const noexcept;
  // Chunks that rank r sends to each other rank in the gather stage.
  uint64_t gathered_from(uint32_t r) const noexcept;
  // Chunk c of rank r's slice of what this rank has.
  ByteSpan slice(uint32_t r, uint64_t chunk) const noexcept;
  // What this rank brings to a gather goes to its place, if it is not there.
  static void place_own(const Launch &launch, uint32_t rank) noexcept;
  // Where the sum of this rank's slice goes, and whether it is added to what is there.
  ByteSpan sum(uint64_t chunk, bool &accumulate) const noexcept;

 private:
  struct Cut {
    const Piece *piece;
    uint64_t offset, bytes;  // of the chunk, in the slice
  };
  uint64_t slice_bytes(const Piece &piece) const noexcept;
  std::pair<uint64_t, uint64_t> bounds(const Piece &piece, uint32_t r) const noexcept;
  Cut cut(uint32_t r, uint64_t chunk) const noexcept;
  Operation operation() const noexcept { return launch_->operation; }

  const Launch *launch_ = nullptr;
  uint32_t rank_ = 0, ranks_ = 1;
  uint64_t chunk_bytes_ = 64, chunks_ = 0;
  std::vector<uint64_t> first_;  // chunk of each piece
};

}  // namespace fsdp::transport::messages
