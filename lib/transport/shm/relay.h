// SPDX-License-Identifier: Apache-2.0
// Copies bytes between ranks of a host whose buffers are private, through a small shared memory. Each rank has two
// halves, which are used in turn. In a step a rank writes its half, waits for all ranks, and reads the others' halves.
// A rank that has come to the next step has finished reading the previous one, so the half of the step before that is
// free again.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/mapping.h"
#include "transport/call/launch.h"
#include "transport/shm/versions.h"

namespace fsdp::transport {

class ShmCollectives;

class Relay {
 public:
  static uint64_t size_bytes(uint32_t team_size) { return team_size * sizeof(Word); }
  // `halves` has message_staging_bytes of each rank; each rank writes its own. `steps` has size_bytes bytes, all zero.
  Relay(std::unique_ptr<Arena> halves, Mapping steps, uint32_t rank, std::vector<uint32_t> ranks);
  // Runs on the stream's thread, when all ranks are in this launch. Returns false if the launch was given up.
  bool carry(ShmCollectives &calls, const Launch &launch);
  uint64_t sent_bytes() const noexcept { return sent_.load(std::memory_order_relaxed); }

 private:
  // The launch that is under way.
  struct Way {
    ShmCollectives &calls;
    const Launch &launch;
  };

  uint32_t size() const noexcept { return words_.size(); }
  bool carry(const Way &way, const Piece &piece);
  bool sum_chunk(const Way &way, const Piece &piece, uint64_t offset, uint64_t count);
  bool slice_chunk(const Way &way, const Piece &piece, uint64_t offset, uint64_t count);
  bool gather_chunk(const Way &way, const Piece &piece, uint64_t offset, uint64_t bytes);
  bool broadcast_chunk(const Way &way, const Piece &piece, uint64_t offset, uint64_t bytes);
  // Copies the moves of an exchange. Each rank's halves carry the bytes that it sends, one move after the other.
  bool carry_moves(const Way &way);
  bool move_chunk(const Way &way, uint64_t first);
  void sum(float *to, uint64_t offset, uint64_t count, bool accumulate) const;
  std::byte *own_half() const noexcept;
  const std::byte *half(uint32_t r) const noexcept;
  // Called when this rank's half is written: waits for the halves of all ranks of this step, which half() then returns.
  bool meet(const Way &way);
  void count_sent(uint64_t bytes) noexcept { sent_.fetch_add(bytes, std::memory_order_relaxed); }

  std::unique_ptr<Arena> halves_;
  Mapping memory_;
  uint32_t rank_;
  std::vector<uint32_t> ranks_;
  Words words_;
  uint64_t step_ = 0;  // has the round in its upper bits, so that ranks agree again after an incomplete round
  std::atomic<uint64_t> sent_{0};
};

}  // namespace fsdp::transport
