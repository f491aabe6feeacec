// SPDX-License-Identifier: Apache-2.0
// What ranks tell each other on the caller's thread, in few bytes: that they are here, that they say the same, what
// each of them has. All of it collective, in the same order on every rank; `what` is compared between ranks and shown
// in messages. A call that was interrupted leaves the ranks at odds: later ones are INVALID_STATE here.
//
//   agree        one ballot of 64 bytes a rank, folded into one on the way: nothing grows with the number of ranks
//   all_gather   every rank's bytes for all of them
//   barrier      an agreement on nothing
//
// Ranks that must tell the same, and can tell of trouble, agree first, which is all there is to do in a run that goes
// well. Text follows only where ranks differ, and only from the ranks that the error names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/device.h"

namespace fsdp::transport {

// A rank that pulls from its peers' memory must know when it is written, and the peers must know when it has been read.
//
//   a rank     writes its parts   publish     await, pull ...      meets the others       writes its parts   publish
//              of version v                   all ranks' parts     its pulls have ended   of version v + 1
//
// That they are written is told here. That they have been read need not be told. What is written next is agreed on, so
// all ranks meet in between, each when its own pulls have ended on its streams, and from then on no rank reads.

class Versions {
 public:
  virtual ~Versions() = default;
  // This rank's parts are those of the version, which is never less than the last one, when the writer has done what it
  // was given before. Peers know from now on that this rank's caller has done its part.
  virtual void publish(uint64_t version, device::Stream &writer) = 0;
  // Are those of all ranks? One acquire load a rank, no system call.
  virtual bool ready(uint64_t version) const noexcept = 0;
  // What follows on the reader comes after that. Threads that wait poll what they must, and the calling thread may do
  // so again if it was interrupted. what: for messages; it stays where it is until the stream has come by.
  virtual void await(uint64_t version, device::Stream &reader, const char *what) = 0;
};

// What one rank says.
struct Saying {
  uint64_t same = 0;       // a hash of what all ranks must say alike
  bool troubled = false;   // it cannot go on, and will say why
  uint64_t waited_ns = 0;  // for the others, in an earlier meeting: the rank that waited least came last. Clocks of
                           // hosts differ, so no time of day is told; 0: nothing to tell
};

// What one rank says, or any number of them together.
struct alignas(64) Ballot {
  static constexpr uint32_t nobody = UINT32_MAX;
  uint64_t same = 0;  // what the lowest rank says
  uint64_t call = 0;  // a hash of what the ranks call, for meetings on a board
  uint32_t first = nobody, odd = nobody,
           troubled = nobody;  // the lowest rank; ... that says something else; ... in trouble
  uint32_t last = nobody;      // the rank that waited least, the lowest of equals
  uint64_t least_waited_ns = 0, most_waited_ns = 0;
  uint64_t unused[2] = {};

  static Ballot of(uint32_t rank, const Saying &saying) noexcept;
  void add(const Ballot &other) noexcept;
  bool agreed() const noexcept { return odd == nobody && troubled == nobody; }
};
static_assert(sizeof(Ballot) == 64);

class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual uint32_t rank() const noexcept = 0;
  virtual uint32_t size() const noexcept = 0;
  // The rank of the job that is rank r here: what errors name.
  virtual uint32_t world_rank(uint32_t r) const noexcept = 0;

  // Ranks in the result are of these, not of the job.
  Ballot agree(const Saying &mine, const char *what) { return fold(Ballot::of(rank(), mine), what); }
  void barrier(const char *what) { agree({}, what); }
  // The same for a ballot that stands for several ranks already.
  virtual Ballot fold(const Ballot &mine, const char *what) = 0;
  // Every rank's bytes, without allocation: rank r's `bytes` bytes go to all + r * bytes (any length, in chunks).
  virtual void all_gather(const void *mine, uint64_t bytes, void *all, const char *what) = 0;
  // ... in rank order, where lengths may differ.
  virtual std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine, const std::string &what) = 0;
  // So often have these ranks met, in agreements and for every chunk of bytes.
  virtual uint64_t meetings() const noexcept = 0;
};

// What fails on one rank must fail on all: if any has an error, the lowest one's is thrown on all, with the same text.
void share_error(Exchange &ranks, const std::optional<Error> &mine, const std::string &what);
// A step of a common creation: what it throws is shared.
void attempt_together(Exchange &ranks, const std::string &what, const std::function<void()> &step);
// The ranks have agreed that some are in trouble: throws the error of the lowest one, which it alone tells, on all.
[[noreturn]] void throw_troubled(Exchange &ranks, const Ballot &told, const std::optional<Error> &mine,
                                 const std::string &what);

// What a rank says of itself, of at most 500 bytes, all ranks must say; else MISMATCH on all of them, which names the
// lowest rank that differs from the first one and quotes both.
void agree_on(Exchange &ranks, const std::string &what, const std::string &said);

// After an exchange that every rank answers with an error. A rank that goes on with it may leave the job at once, and a
// slower one that still waits in the exchange would be told of that end and not of its reason. So all come here first,
// each when it has read. Does not throw; without it the error is only less exact.
void await_readers(Exchange &ranks) noexcept;

}  // namespace fsdp::transport
