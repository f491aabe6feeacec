// SPDX-License-Identifier: Apache-2.0
// Messages between ranks whose bytes lie in memory of devices. The host's communicator sends and sums them: chunk by
// chunk they come down to pinned memory, and their results go back. See conveyor.h.
#pragma once

#include <memory>
#include <string>

#include "comm/call/fingerprint.h"
#include "comm/communicator.h"
#include "comm/staging/conveyor.h"
#include "comm/staging/pieces.h"
#include "comm/staging/sizes.h"

namespace fsdp::comm::staging {

class DeviceMessages final : public MessageCommunicator {
 public:
  // team: of the host. host: of its ranks.
  DeviceMessages(std::shared_ptr<Team> team, std::unique_ptr<MessageCommunicator> host, device::Device &device,
                 const Sizes &sizes, const std::string &what);
  ~DeviceMessages() override;

  void all_reduce(std::span<const SumSpan> spans, Tag tag, device::Stream &stream) override;
  void reduce_scatter(std::span<const SliceSumSpan> spans, Tag tag, device::Stream &stream) override;
  void all_gather(std::span<const WholeSpan> spans, Tag tag, device::Stream &stream) override;
  void broadcast(std::byte *data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) override;
  void barrier(Tag tag, device::Stream &stream) override;
  uint64_t sent_bytes() const noexcept override { return host_->sent_bytes(); }

  void quiesce() override { host_->quiesce(); }
  void abandon() override { host_->abandon(); }
  std::optional<Error> broken() const override { return host_->broken(); }
  void next_round() override;

 private:
  template <class Body>
  void enqueue(Fingerprint &call, device::Stream &stream, Body &&body);
  // For each slot: bring(from, slot) fills it and returns where the next one begins, send(from, slot, tag) gives it to
  // the host's communicator, take(from, slot) carries the results back.
  template <class Bring, class Send, class Take>
  void carry(const Fingerprint &call, uint64_t span_count, Bring &&bring, Send &&send, Take &&take);
  std::byte *slot(uint64_t index) const { return memory_->data() + index * sizes_.slot_bytes; }
  device::Stream &down() { return conveyor_.down(); }
  device::Stream &up() { return conveyor_.up(); }
  device::Stream &host_stream() { return conveyor_.lane().stream(); }

  std::shared_ptr<Team> team_;
  device::Device &device_;
  Sizes sizes_;
  std::unique_ptr<MessageCommunicator> host_;
  uint32_t rank_;
  uint32_t size_;
  std::unique_ptr<device::Memory> memory_;
  std::unique_ptr<device::Event> done_;
  uint64_t calls_ = 0;   // of this round
  uint64_t chunks_ = 0;  // ... and their chunks
  Conveyor conveyor_;    // last: its work refers to the rest
};

}  // namespace fsdp::comm::staging
