// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/board.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/checked.h"

namespace fsdp::comm {
namespace {

class AwaitedBoard final : public AwaitedWords {
 public:
  AwaitedBoard(const Words &words, uint64_t meeting, const char *what) : AwaitedWords(words, meeting), what_(what) {}
  bool needs_callers() const override { return true; }
  std::string text() const override { return what_; }

 private:
  const char *what_;
};

// Of a peer's memory: it may lack its end.
template <size_t N>
std::string bounded_text(const char (&text)[N]) {
  return std::string(text, ::strnlen(text, N));
}

}  // namespace

uint64_t Board::size_bytes(uint32_t team_size) noexcept { return round_up(team_size * sizeof(Place), page_size()); }

Board::Board(Seat &seat, uint32_t rank, std::span<const uint32_t> ranks, Mapping memory)
    : seat_(seat), rank_(rank), memory_(std::move(memory)), words_(memory_.data(), sizeof(Place), ranks) {}

void Board::meet(std::span<const std::byte> mine, uint64_t offset, bool fixed, const char *what) {
  seat_.watch.check();  // a context that failed does not come: its peers are told
  ++meetings_;
  Half &place = half(rank_);
  place.total = mine.size();
  place.fixed = fixed;
  std::strncpy(place.what, what, sizeof place.what - 1);
  if (offset < mine.size())
    std::memcpy(place.chunk, mine.data() + offset, std::min<uint64_t>(chunk_bytes, mine.size() - offset));
  words_[rank_].raise(meetings_);
  AwaitedBoard awaited(words_, meetings_, what);
  seat_.watch.wait(awaited);
  check_same_call(fixed);
}

// Both names are on the board, so every rank comes to the same first difference.
void Board::check_same_call(bool fixed) {
  const Half &first = half(0);
  for (uint32_t r = 1; r < words_.size(); ++r) {
    const Half &other = half(r);
    const bool same_length = !fixed || first.total == other.total;
    if (first.fixed == other.fixed && same_length && !std::strncmp(first.what, other.what, sizeof first.what)) continue;
    const auto name = [](const Half &of) {
      return of.fixed ? format_text("'{}' ({} bytes)", bounded_text(of.what), of.total)
                      : format_text("'{}'", bounded_text(of.what));
    };
    seat_.watch.condemn(Verdict::mismatch, words_.world_rank(r),
                        format_text("rank {} called {}, rank {} called {}", words_.world_rank(0), name(first),
                                    words_.world_rank(r), name(other)));
  }
}

void Board::exchange_fixed(const void *mine, uint64_t bytes, void *all, const char *what) {
  seat_.watch.enter_caller();
  if (torn_) fail(FSDP_INVALID_STATE, "{}: an earlier exchange of this team did not complete", what);
  torn_ = true;
  const std::span message(static_cast<const std::byte *>(mine), bytes);
  uint64_t offset = 0;
  do {
    meet(message, offset, true, what);
    const uint64_t length = std::min(chunk_bytes, bytes - offset);
    for (uint32_t r = 0; r < words_.size() && length; ++r)
      std::memcpy(static_cast<std::byte *>(all) + r * bytes + offset, half(r).chunk, length);
    offset += length;
  } while (offset < bytes);
  torn_ = false;
}

std::vector<std::vector<std::byte>> Board::exchange(std::span<const std::byte> mine, const std::string &what) {
  seat_.watch.enter_caller();
  if (torn_) fail(FSDP_INVALID_STATE, "{}: an earlier exchange of this team did not complete", what);
  torn_ = true;
  std::vector<std::vector<std::byte>> all(words_.size());
  std::vector<uint64_t> totals(words_.size());
  uint64_t longest = 0;
  uint64_t offset = 0;
  do {
    meet(mine, offset, false, what.c_str());
    for (uint32_t r = 0; r < words_.size(); ++r) {
      if (offset == 0) {
        totals[r] = half(r).total;
        longest = std::max(longest, totals[r]);
      }
      const uint64_t length = offset < totals[r] ? std::min(chunk_bytes, totals[r] - offset) : 0;
      all[r].insert(all[r].end(), half(r).chunk, half(r).chunk + length);
    }
    offset += chunk_bytes;
  } while (offset < longest);
  torn_ = false;
  return all;
}

}  // namespace fsdp::comm
