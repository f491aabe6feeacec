// SPDX-License-Identifier: Apache-2.0
// Small exchanges between ranks on the caller's thread. They tell that the ranks are here, that they agree, or what
// data each rank has. All calls are collective, in the same order on every rank; `what` is compared between ranks and
// shown in messages. After an interrupted call the ranks no longer agree on their calls, so later calls of this object
// throw INVALID_STATE.
//
//   agree        one ballot of 64 bytes per rank; ballots are folded into one, so nothing grows with the number of
//                ranks
//   all_gather   every rank gets the bytes of all ranks
//   barrier      an agreement on nothing
//
// Ranks that must agree, or may report trouble, call agree first. Usually nothing else is needed. Texts are exchanged
// only if ranks differ, and only from the ranks that the error names.
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

// A rank that pulls from its peers' memory must know when that memory is written. The peers must know when all reads of
// their memory are done.
//
//   a rank     writes its parts   publish     await, pull ...      meets the others       writes its parts   publish
//              of version v                   all ranks' parts     its pulls have ended   of version v + 1
//
// Versions tell that parts are written. The end of the reads needs no signal: before the next version is written, all
// ranks synchronize, each after its own pulls have ended on its streams. From then on no rank reads.

class Versions {
 public:
  virtual ~Versions() = default;
  // This rank's parts have the version when `writer` has done all its earlier work. A version is never less than the
  // previous one. Peers know from now on that this rank's caller has published it.
  virtual void publish(uint64_t version, device::Stream &writer) = 0;
  // Have all ranks published the version? This costs one acquire load per rank and no system call.
  virtual bool ready(uint64_t version) const noexcept = 0;
  // Work enqueued later on `reader` starts when ready(version) is true. Threads that wait poll for failures, and a
  // calling thread that was interrupted may call this again. `what` is for messages; the text must exist until the
  // stream has done the wait.
  virtual void await(uint64_t version, device::Stream &reader, const char *what) = 0;
};

// The statement of one rank.
struct Saying {
  uint64_t same = 0;       // a hash of the data that must be the same on all ranks
  bool troubled = false;   // the rank cannot go on, and will send the reason
  uint64_t waited_ns = 0;  // how long it waited for the others in an earlier meeting: the rank that waited least came
                           // last. Clocks of hosts differ, so no time of day is sent; 0: not known
};
// The statement of one rank, or the folded statements of several ranks.
struct alignas(64) Ballot {
  static constexpr uint32_t nobody = UINT32_MAX;
  uint64_t same = 0;  // the statement of the lowest rank
  uint64_t call = 0;  // a hash of the ranks' call, for exchanges on a board
  uint32_t first = nobody, odd = nobody,
           troubled = nobody;  // the lowest rank, the lowest with another statement, the lowest in trouble
  uint32_t last = nobody;      // the rank that waited least, the lowest of equals
  uint64_t least_waited_ns = 0, max_waited_ns = 0;
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
  // The rank in the job of rank r of these ranks, for errors.
  virtual uint32_t world_rank(uint32_t r) const noexcept = 0;
  // Ranks in the result are numbered among these ranks, not in the job.
  Ballot agree(const Saying &mine, const char *what) { return fold(Ballot::of(rank(), mine), what); }
  void barrier(const char *what) { agree({}, what); }
  // Does the same for a ballot that already stands for several ranks.
  virtual Ballot fold(const Ballot &mine, const char *what) = 0;
  // Gathers every rank's bytes without allocation: rank r's `bytes` bytes go to the address all + r * bytes. Any length
  // is possible, because the bytes are sent in chunks.
  virtual void all_gather(const void *mine, uint64_t bytes, void *all, const char *what) = 0;
  // Gathers bytes whose lengths may differ. The result is in rank order.
  virtual std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine, const std::string &what) = 0;
  // The number of exchanges of these ranks so far: one for each agreement and one for each chunk of bytes.
  virtual uint64_t meetings() const noexcept = 0;
};

// Makes a failure of one rank a failure of all: if any rank has an error, the lowest rank's error is thrown on all
// ranks, with the same text.
void share_error(Exchange &ranks, const std::optional<Error> &mine, const std::string &what);
// Runs a step of a creation that all ranks share, and shares its error.
void attempt_together(Exchange &ranks, const std::string &what, const std::function<void()> &step);
// Called after the ranks have agreed that some are in trouble. Only the lowest rank in trouble sends its error, which
// is thrown on all ranks.
[[noreturn]] void throw_troubled(Exchange &ranks, const Ballot &told, const std::optional<Error> &mine,
                                 const std::string &what);

// All ranks must pass the same text, of at most 500 bytes. If not, throws MISMATCH on all of them, which names the
// lowest rank that differs from the first rank and quotes both.
void agree_on(Exchange &ranks, const std::string &what, const std::string &said);
// Called after an exchange that makes every rank fail. A rank that fails may leave the job immediately, and a slower
// rank that still waits in the exchange would learn of that end and not of its reason. So every rank that has read
// waits here for the others. Does not throw. Without this call the error would only be less exact.
void await_readers(Exchange &ranks) noexcept;

}  // namespace fsdp::transport
