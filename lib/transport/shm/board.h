// SPDX-License-Identifier: Apache-2.0
// A team's board in shared memory: every rank writes its ballot or its bytes, and all ranks read all of them. Longer
// messages are sent in chunks. The board has two halves, which are used in turn, so that one exchange per chunk is
// enough: a rank that writes a half again has seen that all ranks came to the other half. Each rank folds all ballots
// itself, one cache line per rank, because waiting for one rank to fold them would take longer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/mapping.h"
#include "membership/seat.h"
#include "transport/exchange.h"
#include "transport/names.h"
#include "transport/shm/versions.h"

namespace fsdp::transport {

class Board {
 public:
  static uint64_t size_bytes(uint32_t team_size) noexcept;
  Board(Seat &seat, uint32_t rank, std::span<const uint32_t> ranks, Mapping memory);

  Ballot fold(const Ballot &mine, const char *what);
  void all_gather(const void *mine, uint64_t bytes, void *all, const char *what);
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine, const std::string &what);
  uint64_t meetings() const noexcept { return meetings_; }

 private:
  static constexpr uint64_t chunk_bytes = 32 * 1024;
  enum class LengthKind : uint32_t {
    lengths,
    fixed,
    ballot
  };  // bytes of different lengths, bytes of one length, or no bytes
  struct BoardCall {
    uint64_t total;  // length of the whole message in bytes
    LengthKind kind;
    WireText<116> what;
    uint64_t hash() const noexcept;
  };
  struct Half {
    BoardCall call;
    std::byte chunk[chunk_bytes];
  };
  struct BoardPlace {
    Word word;
    Ballot ballots[2];
    Half halves[2];
  };
  static_assert(sizeof(BoardPlace) % 64 == 0);

  class Unbroken;
  BoardPlace &place(uint32_t r) const noexcept { return reinterpret_cast<BoardPlace *>(memory_.data())[r]; }
  Half &half(uint32_t r) const noexcept { return place(r).halves[meetings_ % 2]; }
  Ballot &ballot(uint32_t r) const noexcept { return place(r).ballots[meetings_ % 2]; }
  // Puts the ballot, and the chunk at `offset` of this rank's message, on the board. Waits until all ranks have done
  // so.
  void meet(const Ballot &own, std::span<const std::byte> mine, uint64_t offset, LengthKind kind, const char *what);
  void check_same_call();

  Seat &seat_;
  uint32_t rank_;
  Mapping memory_;
  Words words_;
  uint64_t meetings_ = 0;
  bool torn_ = false;  // an error ended a call, so ranks no longer agree on the number of exchanges
};

}  // namespace fsdp::transport
