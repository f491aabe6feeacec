// SPDX-License-Identifier: Apache-2.0
// What moves bytes between ranks: one interface for all transports. It knows nothing of groups or strategies: it
// gathers parts and sums them. Transports: shm/, message/ over tcp/ and ucx/, and for memory of a device staging/ and
// nccl/; which one is decided in factory.cpp alone.
//
// Failure: every wait ends within the timeout, on the context's failure, and within 1 s of a peer's death, with an
// Error that names the rank. What a library thread finds fails the context; what a caller's thread finds is thrown, and
// fails the context too if the job is lost. One verdict (death, abort, mismatch, timeout, a rank whose context failed)
// decides for all ranks, first come, and every wait that does not complete reports that verdict's rank and text.
//
// Which thread is the caller's: the one that last enqueued, exchanged or created something in this world. Only a wait
// on that thread polls the interrupted hook.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/dtype.h"
#include "base/error.h"
#include "base/mapping.h"
#include "device/device.h"

namespace fsdp::transport {

// How the collectives of a team behave, where that shows outside of them. Each transport says it in its own folder.

struct CollectiveTraits {
  // A gather waits for all ranks, which must call it too. Else it pulls a version that all have published, and waits
  // for no rank; ranks that write the next one must know that it has ended (versions.h).
  bool gathers_meet;
  // Ranks that call different things wait for each other inside of streams, so the caller keeps what it has called, for
  // the ranks to compare when they meet. Else every collective is compared before it moves a byte.
  bool records_calls;
  // What a step has enqueued is over when the step has ended, and the next one starts a round of its own, which ranks
  // enter as they come. Else streams may still be at it, and a round lasts until a step is discarded.
  bool rounds_end_with_steps;
  // A ticket is released as soon as all ranks have read the sources. Else they are free when the stream has come by.
  bool releases_tickets;
  // Gradients whose reduce dtype is another are rounded before they travel, in a buffer of their own.
  bool rounds_before_sending;
  // Slices of fewer than 32 bits are summed by the rank that they are for, in rank order, and received in a buffer of
  // the caller's.
  bool receives_slices;
};

class Arena {
 public:
  virtual ~Arena() = default;
  // The whole, readable: all ranks' parts.
  virtual const std::byte *data() const noexcept = 0;
  virtual uint64_t size_bytes() const noexcept = 0;
  // The same bytes, writable where make_writable said so. The same address for the arena's life.
  virtual std::byte *writable() const noexcept = 0;
  // The same bytes, for the caller alone: where it may write by mistake they are another view than data().
  virtual const std::byte *shown() const noexcept { return data(); }
  // The pages of shown() that hold this range show those bytes again, whatever was written there.
  virtual void restore(uint64_t offset, uint64_t bytes) = 0;
  // Can it? Where it cannot, restore is INTERNAL.
  virtual bool restores() const noexcept { return false; }
  // Debug: take away or give back the right to read these pages of shown() on this rank (whole pages inside the range).
  virtual void protect(uint64_t offset, uint64_t bytes, bool readable) = 0;
  // The same of writable(), inside of this rank's ranges.
  virtual void protect_own(uint64_t offset, uint64_t bytes, Access access) = 0;
  // Can it? Where it cannot, these are INTERNAL.
  virtual bool protects() const noexcept = 0;
};

// Memory of every rank, of which a collective reads or writes so many bytes: this rank's own, and where this rank finds
// those of its peers, if they lie in an arena. Only transports that share memory look there: messages carry what each
// rank owns.
struct Part {
  std::byte *own = nullptr;
  const Arena *arena = nullptr;  // rank r's at offset + r * stride; NULL: no other rank reads it
  uint64_t offset = 0;
  uint64_t stride = 0;

  static Part in(const Arena &arena, uint64_t offset, uint64_t stride, uint32_t rank) {
    return {arena.writable() + offset + rank * stride, &arena, offset, stride};
  }
  static Part alone(void *own) { return {static_cast<std::byte *>(own)}; }
  // So many bytes further on.
  Part at(uint64_t bytes) const { return {own + bytes, arena, offset + bytes, stride}; }
  // Rank r's slice of it: r slices further on. rank: this one.
  Part slice(uint64_t bytes, uint32_t rank) const { return {own + rank * bytes, arena, offset, stride + bytes}; }

  float *floats() const { return reinterpret_cast<float *>(own); }
  const std::byte *of(uint32_t rank) const { return arena->data() + offset + rank * stride; }
};

// Rank r's part goes to to + r * bytes. One that is there already is not copied.
struct Gather {
  Part from;
  std::byte *to;
  uint64_t bytes;
};

// Every rank has `count` addends, cut into one slice a rank: of size() equal ones the rank's own is summed over all
// ranks in rank order (device::RankSum) into `to`, in fp32. Or everywhere: `to` has `count` elements on each rank, the
// slices are summed there, at their place, and then gathered, so that the bits are the same; the last slices may then
// be shorter. `to` may be this rank's own slice of `from`, or everywhere `from` itself (on all ranks or on none), then
// without accumulate; else the two share nothing.
struct Sum {
  Part from;
  Part to;
  fsdp_dtype dtype = FSDP_FLOAT32;
  fsdp_dtype wire = FSDP_FLOAT32;
  uint64_t count = 0;
  float factor = 1;
  bool everywhere = false;
  // Of a device, for it to work in, with `count` elements each; this rank's own `from` is lost too. Where `wire` is
  // smaller than `dtype`: `rounded`, of that. Where the ranks of a team that receives slices send fewer than 32 bits:
  // `received`, of what they send; NULL: `from` has room for it, and `to` is not there.
  std::byte *rounded = nullptr;
  std::byte *received = nullptr;

  // What an addend travels in: rounding what travels and what is summed are the same.
  fsdp_dtype sent_dtype() const noexcept { return dtype_size(wire) < dtype_size(dtype) ? wire : dtype; }
  // fp32 that travels as it is, unscaled: what messages of the host can add.
  bool plain() const noexcept { return dtype == FSDP_FLOAT32 && wire == FSDP_FLOAT32 && factor == 1.0F; }
};

// What a team's collectives will be asked for.
struct Shape {
  // Parts lie in arenas of the team. Else each rank names memory of its own, which no other one reads; and sums are
  // plain, those everywhere in place.
  bool arenas = true;
  // So many neighbouring ranks are summed (and scaled) first, and the blocks' sums added in order: to = b0, += b1, ...
  // or, to accumulate, to += b0, += b1, ... 0: all ranks are one block. Without arenas a block is one rank.
  uint32_t block = 0;
  // Will it be asked for sums? If not, it needs no memory for them.
  bool sums = true;
  // About how many bytes its longest call moves: a transport that copies through memory of its own has no use for more.
  uint64_t longest_call = UINT64_MAX;

  static constexpr Shape messages(bool sums = true, uint64_t longest_call = UINT64_MAX) {
    return {.arenas = false, .block = 1, .sums = sums, .longest_call = longest_call};
  }
};

struct Fingerprint;  // transport/call/launch.h

// What the caller says a collective is, compared between ranks: an operation number is added by the transport.
struct Tag {
  uint32_t what = 0;      // the engine's number for the object, say a group index
  const char *name = "";  // for messages; copied by the call
  // For callers that make one call of several collectives: that call, which messages name in their stead. Copied by the
  // call too.
  const Fingerprint *call = nullptr;
  const char *note = "";  // follows the name in messages, and is not compared; copied too
};

// A collective that was enqueued. released: every rank has read what it reads of this rank's sources.
struct Ticket {
  uint64_t phase = 0;  // 0: nothing was enqueued, or its sources are free when the stream has come by
};

// One ordered sequence of collectives, each enqueued on a device stream. Its tasks must run in the order in which they
// were enqueued: one stream, or streams that events join. Every collective waits for all ranks, so that their calls can
// be compared, and those that call different things get MISMATCH naming both. It comes at once, or when the ranks meet
// if what was enqueued cannot be taken back (NCCL). gather_stable may not wait, and is then compared with nothing.
class Collectives {
 public:
  virtual ~Collectives() = default;
  // Sources must be stable on every rank, from a version that the stream has awaited until the ranks meet when it has
  // come by (versions.h): nothing is synchronized, only copied.
  virtual void gather_stable(std::span<const Gather> gathers, Tag tag, device::Stream &stream) = 0;
  virtual Ticket gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) = 0;
  // All of them everywhere, or none. accumulate: to what `to` has (everywhere: this rank's slice of it).
  virtual Ticket sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) = 0;
  // Of the root's data.own to that of the others; shared memory reads the root's part.
  virtual Ticket broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) = 0;
  virtual Ticket barrier(Tag tag, device::Stream &stream) = 0;
  // What follows on the stream starts when the ticket is released. On the caller's stream of the host device: blocks.
  virtual void await_release(Ticket ticket, device::Stream &stream) = 0;
  // True also for a round whose rest is skipped: what peers would still read of it is of no use.
  virtual bool released(Ticket ticket) const noexcept = 0;
  // Bytes that this rank has sent to others, for statistics. A transport that reads its peers' memory sends nothing.
  virtual uint64_t sent_bytes() const noexcept = 0;

  // -- the end of a step, and its failure --
  // quiesce: this rank enqueues nothing more in this round (FSDP_INTERNAL if it does). A peer that waits for more gets
  // MISMATCH naming this rank.
  virtual void quiesce() = 0;
  // abandon: collectives of this round that cannot complete are skipped, here and on peers (no failure of the context).
  virtual void abandon() = 0;
  // Did a collective of this round end by abandon, or by a mismatch? The error to report, if so.
  virtual std::optional<Error> broken() const = 0;
  // Start the next round. All ranks must have quiesced or abandoned, their streams be idle, and have met since.
  // Sequence numbers agree again afterwards. Where rounds end with steps what is enqueued next waits for ranks that
  // have yet to start this round; else all must meet once more before.
  virtual void next_round() = 0;
};

}  // namespace fsdp::transport
