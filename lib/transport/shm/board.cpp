// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/board.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/checked.h"

namespace fsdp::transport {
namespace {

class AwaitedBoard final : public AwaitedWords {
 public:
  AwaitedBoard(const Words &words, uint64_t meeting, const char *what) : AwaitedWords(words, meeting), what_(what) {}
  bool needs_callers() const override { return true; }
  std::string text() const override { return what_; }

 private:
  const char *what_;
};

}  // namespace

uint64_t Board::size_bytes(uint32_t team_size) noexcept {
  return round_up(team_size * sizeof(BoardPlace), page_size());
}

Board::Board(Seat &seat, uint32_t rank, std::span<const uint32_t> ranks, Mapping memory)
    : seat_(seat), rank_(rank), memory_(std::move(memory)), words_(memory_.data(), sizeof(BoardPlace), ranks) {}

// After a call of this team that ends by an error the ranks no longer agree on the number of exchanges.
class Board::Unbroken {
 public:
  Unbroken(Board &board, const char *what) : board_(board) {
    board.seat_.watch.enter_caller();
    if (board.torn_) fail(FSDP_INVALID_STATE, "{}: an earlier exchange of this team did not complete", what);
    board.torn_ = true;
  }
  void done() noexcept { board_.torn_ = false; }

 private:
  Board &board_;
};

uint64_t Board::BoardCall::hash() const noexcept {
  uint64_t hash = (0xcbf29ce484222325 ^ static_cast<uint64_t>(kind)) * 0x100000001b3;  // FNV-1a
  if (kind == LengthKind::fixed) hash = (hash ^ total) * 0x100000001b3;
  for (const char c : what.view()) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

void Board::meet(const Ballot &own, std::span<const std::byte> mine, uint64_t offset, LengthKind kind,
                 const char *what) {
  seat_.watch.check();  // a failed context takes no part, and tells its peers
  ++meetings_;
  Half &place = half(rank_);
  place.call.total = mine.size();
  place.call.kind = kind;
  place.call.what.set(what);
  if (offset < mine.size())
    std::memcpy(place.chunk, mine.data() + offset, std::min<uint64_t>(chunk_bytes, mine.size() - offset));
  ballot(rank_) = own;
  ballot(rank_).call = place.call.hash();
  words_[rank_].raise(meetings_);
  AwaitedBoard awaited(words_, meetings_, what);
  seat_.watch.wait(awaited);
  check_same_call();
}

// All names are on the board, so every rank finds the same first difference.
void Board::check_same_call() {
  for (uint32_t r = 1; r < words_.size(); ++r) {
    if (ballot(r).call == ballot(0).call) continue;
    const auto name = [](const BoardCall &call) {
      return call.kind == LengthKind::fixed ? format_text("'{}' ({} bytes)", call.what.view(), call.total)
                                            : format_text("'{}'", call.what.view());
    };
    seat_.watch.condemn(FailureKind::mismatch, words_.world_rank(r),
                        format_text("rank {} called {}, rank {} called {}", words_.world_rank(0), name(half(0).call),
                                    words_.world_rank(r), name(half(r).call)));
  }
}

Ballot Board::fold(const Ballot &mine, const char *what) {
  Unbroken unbroken(*this, what);
  meet(mine, {}, 0, LengthKind::ballot, what);
  Ballot folded = ballot(0);
  for (uint32_t r = 1; r < words_.size(); ++r) folded.add(ballot(r));
  unbroken.done();
  return folded;
}

void Board::all_gather(const void *mine, uint64_t bytes, void *all, const char *what) {
  Unbroken unbroken(*this, what);
  const std::span message(static_cast<const std::byte *>(mine), bytes);
  uint64_t offset = 0;
  do {
    meet({}, message, offset, LengthKind::fixed, what);
    const uint64_t length = std::min(chunk_bytes, bytes - offset);
    for (uint32_t r = 0; r < words_.size() && length; ++r)
      std::memcpy(static_cast<std::byte *>(all) + r * bytes + offset, half(r).chunk, length);
    offset += length;
  } while (offset < bytes);
  unbroken.done();
}

std::vector<std::vector<std::byte>> Board::all_gather(std::span<const std::byte> mine, const std::string &what) {
  Unbroken unbroken(*this, what.c_str());
  std::vector<std::vector<std::byte>> all(words_.size());
  std::vector<uint64_t> totals(words_.size());
  uint64_t longest = 0;
  uint64_t offset = 0;
  do {
    meet({}, mine, offset, LengthKind::lengths, what.c_str());
    for (uint32_t r = 0; r < words_.size(); ++r) {
      if (offset == 0) {
        totals[r] = half(r).call.total;
        longest = std::max(longest, totals[r]);
      }
      const uint64_t length = offset < totals[r] ? std::min(chunk_bytes, totals[r] - offset) : 0;
      all[r].insert(all[r].end(), half(r).chunk, half(r).chunk + length);
    }
    offset += chunk_bytes;
  } while (offset < longest);
  unbroken.done();
  return all;
}

}  // namespace fsdp::transport
