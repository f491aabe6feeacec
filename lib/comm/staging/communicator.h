// SPDX-License-Identifier: Apache-2.0
// Collectives over memory of devices whose ranks share a host: see conveyor.h for how the bytes travel. The host's
// communicator compares the calls, tells when all ranks have brought their bytes, and keeps rounds and failure; each
// device then takes what it needs from the parts of the others and adds it in rank order, so bits equal those of the
// host.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "comm/call/fingerprint.h"
#include "comm/communicator.h"
#include "comm/staging/conveyor.h"
#include "comm/staging/pieces.h"
#include "comm/staging/sizes.h"
#include "comm/staging/slots.h"

namespace fsdp::comm::staging {

class DeviceCommunicator final : public Communicator {
 public:
  // team: of the host. host: of its ranks. reduction_block as in create_communicator.
  DeviceCommunicator(std::shared_ptr<Team> team, std::unique_ptr<Communicator> host, std::unique_ptr<Slots> slots,
                     device::Device &device, const Sizes &sizes, uint32_t reduction_block, const std::string &what);
  ~DeviceCommunicator() override;

  void gather_stable(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket all_gather(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket reduce_scatter(std::span<const ReduceSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket all_reduce(std::span<const AllReduceSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket broadcast(const Source &from, uint32_t root, std::byte *to, uint64_t bytes, Tag tag,
                   device::Stream &stream) override;
  Ticket barrier(Tag tag, device::Stream &stream) override;
  void await_release(Ticket ticket, device::Stream &stream) override;
  bool released(Ticket ticket) const noexcept override;

  void quiesce() override { host_->quiesce(); }
  void abandon() override { host_->abandon(); }
  std::optional<Error> broken() const override { return host_->broken(); }
  void next_round() override;

 private:
  static constexpr uint64_t calls_kept = 16;
  // A rank that is at the step of a chunk has taken the chunk so many before. So a slot is free again when its
  // successor by as many has been stepped through; chunks are brought one ahead of the steps, which makes it slots -
  // lag - 1 = 1.
  static constexpr uint64_t lag = 2;
  static_assert(Conveyor::slots == lag + 2);
  struct Gathered;  // an all-gather and
  struct Reduced;   // a reduce-scatter, as the device sees them

  // Enqueues what `body` does between begin and end. If it does not come to its end no rank can go on.
  template <class Body>
  Ticket enqueue(Fingerprint &call, device::Stream &stream, Body &&body);
  // bring(from, slot) fills a slot and returns where the next one begins; take(from, slot) does the rest of it.
  template <class Bring, class Take>
  void carry(const Fingerprint &call, uint64_t span_count, Bring &&bring, Take &&take);
  void step(const Fingerprint &call, uint64_t chunk);
  template <class SpanAt>
  void carry_gather(const Fingerprint &call, uint64_t span_count, SpanAt &&span_at);
  template <class SpanAt>
  void carry_reduce(const Fingerprint &call, uint64_t span_count, SpanAt &&span_at);
  template <class Span>
  Reduced reduced(const Span &span, float *to) const;
  template <class Span>
  void round_to_wire(const Span &span);
  void bring_slices(const Reduced &span, const Piece &piece, std::byte *part);
  void take_slices(uint64_t slot, uint64_t bytes);
  void sum(const Reduced &span, const Piece &piece);
  // This rank's own bytes of a source: there are no others.
  std::byte *own(const Source &from) const { return from.arena->writable() + from.offset + rank_ * from.stride; }

  std::shared_ptr<Team> team_;
  device::Device &device_;
  Sizes sizes_;
  std::unique_ptr<Communicator> host_;
  std::unique_ptr<Slots> slots_;
  uint32_t rank_;
  uint32_t size_;
  uint32_t block_;
  uint64_t room_;  // of one rank's slice in a part
  std::unique_ptr<device::Memory> sums_;
  std::array<std::unique_ptr<device::Event>, calls_kept> done_;
  const device::Event *last_ = nullptr;  // of done_
  uint64_t calls_ = 0;                   // of this round
  uint64_t chunks_ = 0;                  // ... and their chunks: the same on all ranks
  Conveyor conveyor_;                    // last: its work refers to the rest
};

}  // namespace fsdp::comm::staging
