// SPDX-License-Identifier: Apache-2.0
// The bytes of one collective: its chunks, the ranks that send and receive each chunk, and the places of the chunks.
// Pure arithmetic.
//
// Every piece is cut into one slice per rank, and each slice into chunks; chunks c of all slices belong together. In
// the reduce stage rank r sends to each rank chunk c of that rank's slice, and each rank sums the chunks that it
// receives. In the gather stage rank r sends chunk c of its own slice to all ranks.
//
// An exchange has only a gather stage, in which each rank sends every other rank chunks of its own: the moves between
// the two ranks, one after the other, each divided into chunks.
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
  // The number of chunks of a slice.
  uint64_t chunks() const noexcept { return slices_.count(); }
  bool reduces() const noexcept;
  // sent_to() is the number of chunks that this rank sends to rank r in the gather stage; received_from() the number
  // that it receives.
  uint64_t sent_to(uint32_t r) const noexcept;
  uint64_t received_from(uint32_t r) const noexcept;
  // This rank's memory of a chunk of these moves.
  ByteSpan outgoing(uint32_t r, uint64_t chunk) const noexcept;
  ByteSpan incoming(uint32_t r, uint64_t chunk) const noexcept;
  // This rank's memory of chunk `chunk` of rank r's slice.
  ByteSpan slice(uint32_t r, uint64_t chunk) const noexcept;
  // Copies this rank's part of a gather to its place, unless it is there already. Also copies the bytes of moves from
  // this rank to itself.
  static void place_own(const Launch &launch, uint32_t rank) noexcept;
  // The place of the sum of this rank's slice. `accumulate` is set if the sum is added to the values there.
  ByteSpan sum(uint64_t chunk, bool &accumulate) const noexcept;

 private:
  struct Cut {
    const Piece *piece;
    uint64_t offset, bytes;  // offset and length of the chunk in the slice
  };
  // Pieces that are divided into chunks, one piece after the other.
  class Chunks {
   public:
    void clear() noexcept;
    void add(const Piece &piece, uint64_t bytes, uint64_t chunk_bytes);
    uint64_t count() const noexcept { return count_; }
    // Returns the piece that has this chunk. `chunk` becomes its number in the piece.
    const Piece &find(uint64_t &chunk) const noexcept;

   private:
    struct First {
      uint64_t chunk;
      const Piece *piece;
    };
    std::vector<First> firsts_;
    uint64_t count_ = 0;
  };
  void start_slices(uint64_t chunk_bytes);
  void start_moves(uint64_t chunk_bytes);
  ByteSpan move(const Chunks &chunks, uint64_t chunk, Part Piece::*end) const noexcept;
  bool exchanges() const noexcept { return operation() == Operation::exchange; }
  // For a collective that is no exchange: the number of chunks that rank r sends to each other rank in the gather
  // stage.
  uint64_t gathered_from(uint32_t r) const noexcept;
  uint64_t slice_bytes(const Piece &piece) const noexcept;
  std::pair<uint64_t, uint64_t> bounds(const Piece &piece, uint32_t r) const noexcept;
  Cut cut(uint32_t r, uint64_t chunk) const noexcept;
  Operation operation() const noexcept { return launch_->operation; }

  const Launch *launch_ = nullptr;
  uint32_t rank_ = 0, ranks_ = 1;
  uint64_t chunk_bytes_ = 64;
  Chunks slices_;                        // chunks of the longest slice
  std::vector<Chunks> sent_, received_;  // only for an exchange; index: the other rank
};

}  // namespace fsdp::transport::messages
