// SPDX-License-Identifier: Apache-2.0
// A team's board in shared memory: every rank writes its bytes, all read all. Longer messages go in chunks. Two halves
// take turns, so that one meeting a chunk is enough: who writes a half again has seen all come to the other.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/shm/mapping.h"
#include "comm/shm/seat.h"
#include "comm/shm/words.h"

namespace fsdp::comm {

class Board {
 public:
  static uint64_t size_bytes(uint32_t team_size) noexcept;
  Board(Seat &seat, uint32_t rank, std::span<const uint32_t> ranks, Mapping memory);

  void exchange_fixed(const void *mine, uint64_t bytes, void *all, const char *what);
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> mine, const std::string &what);

 private:
  static constexpr uint64_t chunk_bytes = 32 * 1024;
  struct Half {
    uint64_t total;  // bytes of the whole message
    uint32_t fixed;
    char what[116];
    std::byte chunk[chunk_bytes];
  };
  struct Place {
    Word word;
    Half halves[2];
  };
  static_assert(sizeof(Place) % 64 == 0);

  Half &half(uint32_t r) const noexcept { return reinterpret_cast<Place *>(memory_.data())[r].halves[meetings_ % 2]; }
  // Puts the chunk at `offset` of this rank's message on the board and waits until all have theirs there.
  void meet(std::span<const std::byte> mine, uint64_t offset, bool fixed, const char *what);
  void check_same_call(bool fixed);

  Seat &seat_;
  uint32_t rank_;
  Mapping memory_;
  Words words_;
  uint64_t meetings_ = 0;
  bool torn_ = false;  // a call ended by an error: ranks no longer agree on the number of meetings
};

}  // namespace fsdp::comm
