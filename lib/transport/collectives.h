// SPDX-License-Identifier: Apache-2.0
// The interface of all transports, which move bytes between ranks. A transport gathers parts and sums them; it knows
// nothing of groups or strategies. The transports are shm/, message/ over tcp/ and ucx/, and for memory of a device
// staging/ and nccl/. Only factory.cpp chooses one.
//
// Failure: every wait ends within the timeout, on the context's failure, and within 1 s of a peer's death, with an
// Error that names the rank. An error on a library thread fails the context. An error on the caller's thread is thrown,
// and fails the context too if the job is lost. The first verdict (death, abort, mismatch, timeout, a rank whose
// context failed) decides for all ranks: every wait that does not complete reports its rank and text.
//
// The caller's thread is the thread that last enqueued, exchanged or created something in this world. Only a wait on
// that thread polls the interrupted hook.
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

// The properties of a team's collectives that their users must know. Each transport defines its traits in its own
// folder.
struct CollectiveTraits {
  // A gather waits for all ranks, which must call it too. If false, a gather pulls a version that all ranks have
  // published, and waits for no rank. Ranks that write the next version must then know that the gather has ended
  // (versions.h).
  bool gathers_are_collective;
  // Ranks that make different calls would wait for each other inside streams. So the caller keeps a record of its
  // calls, and the ranks compare the records when they synchronize. If false, every collective is compared before it
  // moves a byte.
  bool records_calls;
  // At the end of a step all its enqueued work is over. The next step starts a new round, which each rank enters on its
  // own. If false, streams may still have work, and a round lasts until a step is discarded.
  bool step_ends_round;
  // A ticket is released as soon as all ranks have read the sources. If false, the sources are free when the stream has
  // done the collective.
  bool releases_tickets;
  // Gradients with a different reduce dtype are rounded before they are sent, in a separate buffer.
  bool rounds_gradients_before_sending;
  // Slices of fewer than 32 bits are received in a buffer of the caller. The rank for which they are sums them in rank
  // order.
  bool receives_slices;
};

class Arena {
 public:
  virtual ~Arena() = default;
  // A readable view of the whole arena: the parts of all ranks.
  virtual const std::byte *data() const noexcept = 0;
  virtual uint64_t size_bytes() const noexcept = 0;
  // A view of the same bytes that is writable in this rank's ranges. Its address does not change while the arena lives.
  virtual std::byte *writable() const noexcept = 0;
  // A view of the same bytes for the caller. It is a view of its own if the caller could write into data() by mistake.
  virtual const std::byte *shown() const noexcept { return data(); }
  // Makes the pages of shown() in this range show the arena's bytes again, after any writes into them.
  virtual void restore(uint64_t offset, uint64_t bytes) = 0;
  // Can the arena restore pages? If not, restore() throws INTERNAL.
  virtual bool restores() const noexcept { return false; }
  // Debug mode: takes away or gives back read access to the whole pages of shown() inside this range, on this rank.
  virtual void protect(uint64_t offset, uint64_t bytes, bool readable) = 0;
  // Does the same for writable(), inside of this rank's ranges.
  virtual void protect_own(uint64_t offset, uint64_t bytes, Access access) = 0;
  // Can the arena protect pages? If not, protect() and protect_own() throw INTERNAL.
  virtual bool protects() const noexcept = 0;
};

// Memory of every rank that a collective reads or writes: the address of this rank's memory and, if the memory is in an
// arena, the place of the peers' memory. Only transports that share memory use the arena. Messages carry the memory
// that each rank owns.
struct Part {
  std::byte *own = nullptr;
  const Arena *arena = nullptr;  // has rank r's memory at offset + r * stride; NULL: no other rank reads this memory
  uint64_t offset = 0;
  uint64_t stride = 0;

  static Part in(const Arena &arena, uint64_t offset, uint64_t stride, uint32_t rank) {
    return {arena.writable() + offset + rank * stride, &arena, offset, stride};
  }
  static Part alone(void *own) { return {static_cast<std::byte *>(own)}; }
  // The part that begins `bytes` bytes later.
  Part at(uint64_t bytes) const { return {own + bytes, arena, offset + bytes, stride}; }
  // Rank r's slice of the part, which begins r slices later. `rank` is this rank.
  Part slice(uint64_t bytes, uint32_t rank) const { return {own + rank * bytes, arena, offset, stride + bytes}; }

  float *floats() const { return reinterpret_cast<float *>(own); }
  const std::byte *of(uint32_t rank) const { return arena->data() + offset + rank * stride; }
};

// A gather: rank r's part goes to the address to + r * bytes. A part that is already there is not copied.
struct Gather {
  Part from;
  std::byte *to;
  uint64_t bytes;
};

// A sum. Every rank has `count` addends, divided into one slice per rank. If not `everywhere`, there are size() equal
// slices, and each rank's slice is summed over all ranks, in rank order (device::RankSum) and in fp32, into its `to`.
// If `everywhere`, `to` has `count` elements on each rank. The slices are summed there, each at its place, and then
// gathered, so that the bits are the same. The last slices may then be shorter.
// Without accumulate, `to` may be this rank's slice of `from` or, if `everywhere`, `from` itself (on all ranks or on
// none). Otherwise `from` and `to` do not overlap.
struct Sum {
  Part from;
  Part to;
  fsdp_dtype dtype = FSDP_FLOAT32;
  fsdp_dtype wire = FSDP_FLOAT32;
  uint64_t count = 0;
  float factor = 1;
  bool everywhere = false;
  // Working memory of a device, with `count` elements each; this rank's `from` is overwritten, too. `rounded` is needed
  // if `wire` is smaller than `dtype`, and has elements of `wire`. `received` is needed if the ranks of a team that
  // receives slices send fewer than 32 bits, and has elements of sent_dtype(). If `received` is NULL, `from` has room
  // for the slices, and `to` is not in that room.
  std::byte *rounded = nullptr;
  std::byte *received = nullptr;
  uint64_t results_bytes = 0;  // as in device::RankSum

  // The dtype in which an addend is sent. Rounding before sending gives the same sum as rounding when adding.
  fsdp_dtype sent_dtype() const noexcept { return dtype_size(wire) < dtype_size(dtype) ? wire : dtype; }
  // Is this a sum of fp32 without rounding or scaling? Messages of the host can add only these.
  bool plain() const noexcept { return dtype == FSDP_FLOAT32 && wire == FSDP_FLOAT32 && factor == 1.0F; }
};

// A move of an exchange: `bytes` bytes of the source's part, from `offset` on, go to `to` on the target.
struct Move {
  uint32_t source, target;  // ranks of the team
  uint64_t offset, bytes;
  std::byte *to;  // used only on the target
};

// The kinds of calls for which a team's collectives will be used.
struct Shape {
  // Are the parts in arenas of the team? If not, each rank passes its own memory, which no other rank reads. In that
  // case sums are plain, and sums everywhere are in place.
  bool arenas = true;
  // The number of neighbouring ranks that are summed (and scaled) first. Then the blocks' sums are added in order: to =
  // b0, to += b1, ... or, with accumulate, to += b0, to += b1, ... 0: all ranks are one block. Without arenas a block
  // is one rank.
  uint32_t block = 0;
  // Will there be sums? If not, no memory for sums is needed.
  bool sums = true;
  // An upper bound of the bytes that the longest gather or sum moves; an exchange may move more. A transport that
  // copies through its own memory needs no more memory than that.
  uint64_t longest_call = UINT64_MAX;

  static constexpr Shape messages(bool sums = true, uint64_t longest_call = UINT64_MAX) {
    return {.arenas = false, .block = 1, .sums = sums, .longest_call = longest_call};
  }
};

struct Fingerprint;  // transport/call/launch.h

// The caller's description of a collective, which ranks compare. The transport adds an operation number.
struct Tag {
  uint32_t what = 0;      // the engine's number for the object, such as a group index
  const char *name = "";  // name for messages; copied by the call
  // Set if one call of the user consists of several collectives: messages name that call instead of the collectives.
  // The collective copies this, too.
  const Fingerprint *call = nullptr;
  const char *note = "";  // follows the name in messages and is not compared; copied, too
};

// Stands for a collective that was enqueued. The ticket is released when every rank has finished reading this rank's
// sources.
struct Ticket {
  uint64_t phase = 0;  // 0: nothing was enqueued, or the sources are free when the stream has done the collective
};

// One ordered sequence of collectives, each enqueued on a device stream. The tasks must run in the order in which they
// were enqueued: on one stream, or on streams that events order. Every collective waits for all ranks, so that the
// ranks' calls can be compared. Ranks that make different calls get MISMATCH, which names both calls. They get it
// immediately or, if enqueued work cannot be taken back (NCCL), when the ranks synchronize. gather_stable may run
// without a wait, and is then not compared.
class Collectives {
 public:
  virtual ~Collectives() = default;
  // Copies without synchronization. The sources must be stable on every rank, from the version that the stream has
  // awaited until the ranks synchronize after the stream has done the gather (versions.h).
  virtual void gather_stable(std::span<const Gather> gathers, Tag tag, device::Stream &stream) = 0;
  virtual Ticket gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) = 0;
  // Either all sums are everywhere, or none is. With accumulate, sums are added to the values in `to`; for a sum
  // everywhere, only to this rank's slice of `to`.
  virtual Ticket sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) = 0;
  // Copies the root's data.own to the data.own of the others. Transports with shared memory read the root's part.
  virtual Ticket broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) = 0;
  // Moves bytes between pairs of ranks. Every rank passes the same moves, apart from `to`. Moves read from the part
  // `from`; targets must not overlap with bytes that a move of the call reads. A move to its own source copies. Moves
  // of 0 bytes do nothing. A call without moves only compares the ranks' calls.
  virtual Ticket exchange(const Part &from, std::span<const Move> moves, Tag tag, device::Stream &stream) = 0;
  virtual Ticket barrier(Tag tag, device::Stream &stream) = 0;
  // Work enqueued later on the stream starts when the ticket is released. On the caller's stream of the host device
  // this blocks.
  virtual void await_release(Ticket ticket, device::Stream &stream) = 0;
  // Also true if the rest of the ticket's round is skipped, because peers then need no more data from the round.
  virtual bool released(Ticket ticket) const noexcept = 0;
  // Bytes that this rank has sent to others, for statistics. A transport that reads its peers' memory sends nothing.
  virtual uint64_t sent_bytes() const noexcept = 0;

  // -- the end of a step, and its failure --
  // Declares that this rank enqueues nothing more in this round; a later call would be FSDP_INTERNAL. A peer that waits
  // for more gets MISMATCH, which names this rank.
  virtual void quiesce() = 0;
  // Skips the collectives of this round that cannot complete, here and on peers. The context does not fail.
  virtual void abandon() = 0;
  // Returns the error to report if abandon() or a mismatch ended a collective of this round.
  virtual std::optional<Error> broken() const = 0;
  // Starts the next round. All ranks must have quiesced or abandoned, their streams must be idle, and they must have
  // synchronized since. Afterwards sequence numbers agree again. If rounds end with steps, the next collectives wait
  // for ranks that have not started this round yet. If rounds do not end with steps, all ranks must synchronize once
  // more before the next collective.
  virtual void next_round() = 0;
};

}  // namespace fsdp::transport
