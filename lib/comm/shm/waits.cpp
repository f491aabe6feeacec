// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/waits.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "comm/shm/watch.h"

namespace fsdp::comm {

namespace {

constexpr uint64_t looks_of_a_neighbour = 2;
// What this rank did reaches another node by the network, which may send it again before it arrives: a second and more.
constexpr uint64_t looks_of_a_stranger = 60;

}  // namespace

ShownWait::~ShownWait() {
  if (!shown_) return;
  std::atomic<uint64_t> &looks = entries_[rank_].looks;
  looks.store((looks.load(std::memory_order_relaxed) >> 32) << 32, std::memory_order_seq_cst);
}

void ShownWait::show(const Awaited &awaited, const char *call) {
  WaitEntry &mine = entries_[rank_];
  const uint64_t before = mine.looks.load(std::memory_order_relaxed);
  if (!shown_) {
    const std::string text = format_text("{} ({})", call, awaited.text());
    const size_t length = std::min(text.size(), sizeof mine.text - 1);
    std::memcpy(mine.text, text.data(), length);
    mine.text[length] = '\0';
    mine.looks.store(((before >> 32) + 1) << 32, std::memory_order_relaxed);
    shown_ = true;
  }
  uint32_t first = 0;
  while (first < world_size_ && !awaited.misses(first)) ++first;
  mine.for_rank.store(first, std::memory_order_relaxed);
  mine.looks.fetch_add(1, std::memory_order_seq_cst);
}

// What a peer shows may be older than this rank's last arrival: only when it has looked around twice more since this
// rank first saw it, and still misses this rank in the same wait, does it know of everything this rank did before.
// Each names the first rank that it misses. That is enough: of all callers that wait for each other, those that miss
// the lowest of them name it.
std::optional<uint32_t> ShownWait::look(const Awaited &awaited, const char *call) {
  show(awaited, call);
  for (uint32_t r = 0; r < world_size_; ++r) {
    if (r == rank_ || !awaited.misses(r)) continue;
    const uint64_t looks = entries_[r].looks.load(std::memory_order_seq_cst);
    if (static_cast<uint32_t>(looks) == 0 || entries_[r].for_rank.load(std::memory_order_relaxed) != rank_) continue;
    if (suspect_ == r && suspect_looks_ >> 32 == looks >> 32) {
      if (looks >= suspect_looks_ + (entries_[r].late ? looks_of_a_stranger : looks_of_a_neighbour)) return r;
    } else if (suspect_ == UINT32_MAX || suspect_ == r) {
      suspect_ = r;
      suspect_looks_ = looks;
    }
    return std::nullopt;
  }
  suspect_ = UINT32_MAX;
  return std::nullopt;
}

std::string ShownWait::text(uint32_t rank) const {
  const WaitEntry &entry = entries_[rank];
  return std::string(entry.text, ::strnlen(entry.text, sizeof entry.text));
}

}  // namespace fsdp::comm
