// SPDX-License-Identifier: Apache-2.0
// Short collectives. The message that announces such a call to a peer also carries all that this rank gives to the
// call, so each rank sends each peer one message, and waits for one from each. (The first call of a channel may take
// two: see Lanes::announce().)
//
//   [ fingerprint | this rank's part of piece 0 | of piece 1 ... ]   packed once, the same for all peers
//
// For a sum, each rank sends all of its elements, and not slices. Every rank adds them in the order of ranks, so the
// bits are those of a sum in slices. A message waits in a box until this rank makes the call. A peer is at most one
// call ahead, so two boxes for each peer are enough: one for the running call, one for the next.
#pragma once

#include <span>
#include <vector>

#include "transport/call/launch.h"
#include "transport/message/channel/transport.h"

namespace fsdp::transport::messages {

// The functions are called with the transport's mutex held, unless a comment says otherwise.
class ShortCalls {
 public:
  // `limit` is the largest number of bytes that a rank gives to a short call, the same on all ranks; 0: no call is
  // short. `memory` has net_boxes_bytes() bytes.
  ShortCalls(uint32_t rank, uint32_t ranks, uint64_t limit, std::byte *memory);

  // Is the call short on all ranks? Needs no mutex.
  bool fits(const Launch &launch) const noexcept;
  // -- without the mutex, by the thread that runs the call --
  void pack(const Launch &launch) noexcept;
  // Copies or adds what the peers gave, from the boxes that choose() has found.
  void unpack(const Launch &launch) noexcept;

  // Notes the boxes of the call. has() must be true for every peer that gives something.
  void choose(const Launch &launch) noexcept;

  // The packed message; empty: this rank gives nothing.
  std::span<const std::byte> packed() const noexcept { return {box(rank_, 0), packed_}; }
  // The number of bytes that rank r gives to the call.
  static uint64_t given_by(uint32_t r, const Launch &launch) noexcept;
  // The place for a message of rank r. The box of the running call is never reused. `running` is NULL if no call runs.
  Place place(uint32_t r, const Header &header, const Launch *running) noexcept;
  // The message has arrived. Returns its bytes, which begin with the fingerprint.
  std::span<const std::byte> arrived(uint32_t r) noexcept;
  void lost(uint32_t r) noexcept;
  // Has the message of rank r for this call arrived?
  bool has(uint32_t r, const Launch &launch) const noexcept { return find(r, launch) != nullptr; }
  bool arriving() const noexcept { return arriving_ > 0; }
  bool arriving_from(uint32_t r) const noexcept;

 private:
  struct BoxState {
    enum class Fill { empty, arriving, full } fill = Fill::empty;
    uint64_t round = 0, number = 0, bytes = 0;
    bool is_of(const Launch &launch) const noexcept { return round == launch.round && number == launch.number; }
    bool older_than(const BoxState &other) const noexcept {
      return round < other.round || (round == other.round && number < other.number);
    }
  };
  // The first box of this rank has the packed message.
  std::byte *box(uint32_t r, size_t i) const noexcept { return memory_ + (2 * r + i) * box_bytes_; }
  const std::byte *find(uint32_t r, const Launch &launch) const noexcept;
  void add(const Launch &launch) noexcept;

  uint32_t rank_, ranks_;
  uint64_t limit_, box_bytes_;
  std::byte *memory_;
  std::vector<BoxState> boxes_;            // two for each rank
  std::vector<const std::byte *> chosen_;  // by rank: the box of the running call, or NULL
  uint64_t packed_ = 0;
  uint32_t arriving_ = 0;
};

}  // namespace fsdp::transport::messages
