// SPDX-License-Identifier: Apache-2.0
// MessageCommunicator between ranks of one host. Their buffers are private, so the bytes go through a little memory
// that they share: each rank has two halves that take turns, and a step is: write own half, wait for all, read the
// others'. Who has come to the next step has read the last one; therefore the half before that is free again.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/shm/communicator.h"

namespace fsdp::comm {

class StagedCommunicator final : public MessageCommunicator, private Worker {
 public:
  static uint64_t size_bytes(uint32_t team_size) { return team_size * sizeof(Word); }
  // staging: message_staging_bytes of each rank, writable on its own. steps: size_bytes, zero.
  StagedCommunicator(std::unique_ptr<ShmCommunicator> calls, std::unique_ptr<Arena> staging, Mapping steps,
                     uint32_t rank, std::vector<uint32_t> ranks);

  void all_reduce(std::span<const SumSpan> spans, Tag tag, device::Stream &stream) override;
  void reduce_scatter(std::span<const SliceSumSpan> spans, Tag tag, device::Stream &stream) override;
  void all_gather(std::span<const WholeSpan> spans, Tag tag, device::Stream &stream) override;
  void broadcast(std::byte *data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) override;
  void barrier(Tag tag, device::Stream &stream) override { calls_->barrier(tag, stream); }
  uint64_t sent_bytes() const noexcept override { return sent_.load(std::memory_order_relaxed); }

  void quiesce() override { calls_->quiesce(); }
  void abandon() override { calls_->abandon(); }
  std::optional<Error> broken() const override { return calls_->broken(); }
  void next_round() override { calls_->next_round(); }

 private:
  uint32_t size() const noexcept { return words_.size(); }
  Launch &start(Operation operation, const Tag &tag, uint64_t piece_count);

  // The rest runs where the stream runs. What returns a bool: false if the launch was given up.
  bool work(const Launch &launch) override;
  bool sum_chunk(const Launch &launch, const Piece &piece, uint64_t offset, uint64_t count);
  bool slice_chunk(const Launch &launch, const Piece &piece, uint64_t offset, uint64_t count);
  bool gather_chunk(const Launch &launch, const Piece &piece, uint64_t offset, uint64_t bytes);
  bool broadcast_chunk(const Launch &launch, const Piece &piece, uint64_t offset, uint64_t bytes);
  void sum(float *to, uint64_t offset, uint64_t count, bool accumulate) const;
  std::byte *own_half() const noexcept;
  const std::byte *half(uint32_t r) const noexcept;
  // Own half is written: wait for all ranks' of this step, which half() shows then.
  bool meet(const Launch &launch);
  void count_sent(uint64_t bytes) noexcept { sent_.fetch_add(bytes, std::memory_order_relaxed); }

  std::unique_ptr<ShmCommunicator> calls_;
  std::unique_ptr<Arena> staging_;
  Mapping memory_;
  uint32_t rank_;
  std::vector<uint32_t> ranks_;
  Words words_;
  uint64_t step_ = 0;  // of the round in its upper bits: ranks agree again after a round that was left
  std::atomic<uint64_t> sent_{0};
};

}  // namespace fsdp::comm
