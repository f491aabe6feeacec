// SPDX-License-Identifier: Apache-2.0
// Collectives over memory of devices through memory of the host; conveyor.h describes the way of the bytes. The host's
// collectives compare the calls, tell when all ranks have copied their bytes to the host, and handle rounds and
// failure.
//
// Ranks of one host whose parts are in arenas of the team share the slots. Each device takes the data that it needs
// from the parts of the others, and adds it in rank order. Otherwise each rank has its own slots, and the host's
// collectives exchange and add their contents. In both cases the bits equal those of the host.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/call/launch.h"
#include "transport/staging/conveyor.h"
#include "transport/team.h"

namespace fsdp::transport::staging {

class StagedCollectives final : public Collectives {
 public:
  // `team` is the team on the host, and `host` are its collectives, with the same shape. `slots` are shared by its
  // ranks; NULL without arenas.
  StagedCollectives(std::shared_ptr<Team> team, std::unique_ptr<Collectives> host, std::unique_ptr<Slots> slots,
                    device::Device &device, const ConveyorSizes &sizes, const Shape &shape, const std::string &what);
  ~StagedCollectives() override;

  void gather_stable(std::span<const Gather> gathers, Tag tag, device::Stream &stream) override;
  Ticket gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) override;
  Ticket sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) override;
  Ticket broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) override;
  Ticket exchange(const Part &from, std::span<const Move> moves, Tag tag, device::Stream &stream) override;
  Ticket barrier(Tag tag, device::Stream &stream) override;
  void await_release(Ticket ticket, device::Stream &stream) override;
  bool released(Ticket ticket) const noexcept override;
  uint64_t sent_bytes() const noexcept override { return host_->sent_bytes(); }

  void quiesce() override { host_->quiesce(); }
  void abandon() override { host_->abandon(); }
  std::optional<Error> broken() const override { return host_->broken(); }
  void next_round() override;

 private:
  static constexpr uint64_t calls_kept = 16;
  // A rank that is at the step of chunk n has taken chunk n - lag. So the shared slot of a chunk is free again when all
  // ranks have done the step of the chunk `lag` later. Chunks are brought slots - lag - 1 = 1 ahead of the steps.
  static constexpr uint64_t lag = 2;
  static_assert(Conveyor::slots == lag + 2);
  struct Addends;  // a sum in memory of the device
  // Enqueues the work of `body` between begin and end. If `body` does not finish, no rank can go on.
  template <class Body>
  Ticket enqueue(Fingerprint &call, device::Stream &stream, Body &&body);
  // For each chunk, bring(from, slot) fills a slot and returns where the next chunk begins. If slots are not shared,
  // send(from, slot, tag) passes the slot to the host's collectives. Then take(from, slot) does the rest.
  template <class Bring, class Send, class Take>
  void carry(const Fingerprint &call, uint64_t count, Bring &&bring, Send &&send, Take &&take);
  void await_slot(uint64_t slot);
  template <class Send>
  void step(const Fingerprint &call, uint64_t chunk, Send &&send);
  template <class GatherAt>
  void carry_gathers(const Fingerprint &call, uint64_t count, GatherAt &&gather_at);
  void carry_moves(const Fingerprint &call, const Part &from, std::span<const Move> moves);
  // Passes the chunk that begins at moves_taken_ to the host's collectives.
  void send_moves(std::span<const Move> moves, const MoveChunks &chunks, uint64_t slot, const Tag &step);
  // Sums through shared slots: the device adds.
  void carry_shared(const Fingerprint &call, std::span<const Sum> sums, bool accumulate);
  Addends addends_of(const Sum &sum) const;
  void round_to_wire(const Sum &sum);
  void bring_slices(const Addends &sum, const ChunkPiece &piece, std::byte *part);
  void take_slices(uint64_t slot, uint64_t bytes);
  void add(const Addends &sum, bool accumulate, const ChunkPiece &piece);
  // Sums through slots that are not shared: the host adds.
  void carry_slices(const Fingerprint &call, std::span<const Sum> sums, bool accumulate);
  void carry_wholes(const Fingerprint &call, std::span<const Sum> sums);

  // The address in a slot of rank r's bytes of a gathered piece.
  std::byte *place(uint64_t slot, const ChunkPiece &piece, uint32_t r) const;
  // The address in a slot of a piece that rank r moves. If slots are not shared, each has room for the moves of all
  // ranks, but leaves out moves between other ranks.
  std::byte *moved(uint64_t slot, const ChunkPiece &piece, uint32_t r) const;
  uint64_t moving_room() const noexcept { return slots_ ? slot_room() : room_of(size_); }
  std::byte *own_slot(uint64_t slot) const { return memory_->data() + slot * sizes_.slot_bytes; }
  uint64_t slot_room() const noexcept { return slots_ ? slots_->part_bytes() : sizes_.slot_bytes; }
  uint64_t room_of(uint64_t parts) const noexcept { return slot_room() / parts / piece_alignment * piece_alignment; }
  device::Stream &down() { return conveyor_.down(); }
  device::Stream &up() { return conveyor_.up(); }
  device::Stream &host_stream() { return conveyor_.lane().stream(); }

  std::shared_ptr<Team> team_;
  device::Device &device_;
  ConveyorSizes sizes_;
  Shape shape_;
  std::unique_ptr<Collectives> host_;
  std::unique_ptr<Slots> slots_;            // shared slots
  std::unique_ptr<device::Memory> memory_;  // this rank's own slots
  uint32_t rank_;
  uint32_t size_;
  uint32_t block_;
  std::unique_ptr<device::Memory> sums_;  // memory of the device with the addends
  std::array<std::unique_ptr<device::Event>, calls_kept> done_;
  const device::Event *last_ = nullptr;  // the last recorded event of done_
  uint64_t calls_ = 0;                   // number of calls in this round
  uint64_t chunks_ = 0;                  // number of their chunks, which is the same on all ranks
  std::vector<Cursor> moves_taken_;      // for an exchange: where the next chunk of each rank begins
  std::vector<Move> host_moves_;         // the moves of the host's collectives for one chunk
  Conveyor conveyor_;                    // the last member, because its work refers to the others
};

// The parts of a call's spans that are in one slot.
template <class Span>
struct SlotSpans {
  std::array<Span, max_pieces> spans;
  uint64_t count = 0;
  void add(const Span &span) { spans[count++] = span; }
  std::span<const Span> all() const { return {spans.data(), count}; }
};

template <class Send>
void StagedCollectives::step(const Fingerprint &call, uint64_t chunk, Send &&send) {
  device::HostLane &lane = conveyor_.lane();
  const Tag tag{call.what, call.name, &call};
  lane.wait(conveyor_.brought(chunk % Conveyor::slots));
  if (slots_) {
    lane.wait(conveyor_.taken((chunk + Conveyor::slots - lag) % Conveyor::slots));
    host_->barrier(tag, lane.stream());
  } else {
    send(tag);
  }
  lane.release(up());
}

template <class Bring, class Send, class Take>
void StagedCollectives::carry(const Fingerprint &call, uint64_t count, Bring &&bring, Send &&send, Take &&take) {
  struct Chunk {
    Cursor from;
    uint64_t number;
  };
  const auto finish = [&](const Chunk &chunk) {
    const uint64_t slot = chunk.number % Conveyor::slots;
    step(call, chunk.number, [&](const Tag &tag) { send(chunk.from, slot, tag); });
    take(chunk.from, slot);
    conveyor_.mark_taken(chunk.number);
  };
  std::optional<Chunk> before;
  Cursor next;
  do {  // at least one chunk, in which calls are compared
    const Chunk chunk{next, chunks_++};
    const uint64_t slot = chunk.number % Conveyor::slots;
    conveyor_.pace(chunk.number);
    await_slot(slot);
    next = bring(chunk.from, slot);
    conveyor_.mark_brought(slot);
    if (before) finish(*before);
    before = chunk;
  } while (next.span < count);
  finish(*before);
}

// The bytes that each rank allocates: communicator_bytes() for collectives over arenas, messages_bytes() for
// collectives without arenas. The memory is pinned or on the device, and is in addition to the memory of the host's
// collectives.
uint64_t communicator_bytes(const ConveyorSizes &sizes = {}) noexcept;
uint64_t messages_bytes(const ConveyorSizes &sizes = {}) noexcept;

class StagedTeam final : public DeviceTeam {
 public:
  // `sizes` must be the same on all ranks.
  StagedTeam(std::shared_ptr<Team> host, device::Device &device, const ConveyorSizes &sizes = {})
      : DeviceTeam(std::move(host), device), sizes_(sizes) {}

  std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape) override;

 private:
  ConveyorSizes sizes_;
};

}  // namespace fsdp::transport::staging
