// SPDX-License-Identifier: Apache-2.0
// Shows each rank's long waits to the other ranks: what its caller waits for. Callers that wait for each other in
// different calls would otherwise wait until their timeout; the shown waits let them find out. A caller waits for
// another caller directly, or through a stream of its own, if that stream's collective needs a call of the other
// caller.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "membership/liveness/posts.h"

namespace fsdp::membership {

class Awaited;

// How late a waiting rank may learn of the calls of others.
enum class Late : uint32_t {
  no,
  by_messages,  // by messages, from ranks of other hosts or from neighbours through the network
  remote        // the rank is on another node, and this node's leader writes the entry
};

// Two numbers share a word, so that they change together: the number of the wait, and how often the rank has looked
// since the wait began. If the rank has not looked, it does not wait.
constexpr uint64_t wait_and_looks(uint64_t wait, uint32_t looks) noexcept { return wait << 32 | looks; }
constexpr uint32_t wait_number(uint64_t wait_and_looks) noexcept { return static_cast<uint32_t>(wait_and_looks >> 32); }
constexpr uint32_t look_count(uint64_t wait_and_looks) noexcept { return static_cast<uint32_t>(wait_and_looks); }
constexpr bool same_wait(uint64_t a, uint64_t b) noexcept { return wait_number(a) == wait_number(b); }

// The entry of a rank. Only that rank's caller writes it or, for a rank of another node, the leader. All bytes are zero
// if the rank does not wait.
struct WaitEntry {
  std::atomic<uint64_t> wait_and_looks;  // wait_number() and look_count()
  std::atomic<uint32_t> awaited_rank;    // the first rank whose caller has not made the awaited call; UINT32_MAX: none
  std::atomic<Late> late;
};
static_assert(sizeof(WaitEntry) == 16);

// The texts of waits in a cycle: the calls in which the callers wait. A message with more texts would be unreadable.
using WaitTexts = TextPool<256, 240>;

// The entries and texts of all ranks of a job, in memory that the ranks of a host share.
class Waits {
 public:
  Waits(WaitEntry *entries, WaitTexts *texts) : entries_(entries), texts_(texts) {}
  WaitEntry &operator[](uint32_t rank) const noexcept { return entries_[rank]; }
  const WaitTexts &texts() const noexcept { return *texts_; }
  bool is_current(uint32_t rank, uint32_t number) const noexcept {
    const uint64_t shown = entries_[rank].wait_and_looks.load(std::memory_order_seq_cst);
    return wait_number(shown) == number && look_count(shown) != 0;
  }
  // Must be called by the thread that writes that rank's entry. Has no effect if there is no place.
  void show_text(uint32_t rank, uint32_t number, std::string_view text) const noexcept {
    texts_->store(rank, number, text, [this](uint32_t r, uint32_t n) { return is_current(r, n); });
  }
  // "fsdp_finish_grads (reduce_scatter of 'layer.3' (#17))", or "another call"
  std::string text(uint32_t rank) const;

 private:
  WaitEntry *entries_;
  WaitTexts *texts_;
};

// The first rank, other than `rank`, that is missing until its caller makes a call.
std::optional<uint32_t> first_missed_caller(const Awaited &awaited, uint32_t world_size, uint32_t rank);

// The waits of this rank's streams. They are kept for this rank's caller, which may be waiting for one of the streams.
class StreamWaits {
 public:
  struct StreamWait {
    uint64_t thread = 0;
    uint64_t number = 0;  // number of the wait, unique in this rank
    uint64_t looks = 0;
    std::optional<uint32_t> awaited_rank;
    std::string text;
    Late late = Late::no;
  };
  void look(StreamWait &entry, std::optional<uint32_t> awaited_rank);
  void begin(StreamWait &entry);
  void end(const StreamWait &entry) noexcept;
  // A copy of the thread's wait, if the thread waits.
  std::optional<StreamWait> find(uint64_t thread) const;

 private:
  mutable std::mutex mutex_;
  std::vector<StreamWait *> entries_;
  uint64_t numbers_ = 0;
};

// One wait of a stream.
class StreamWait {
 public:
  StreamWait(StreamWaits &waits, uint64_t thread) : waits_(waits) { entry_.thread = thread; }
  ~StreamWait() {
    if (entry_.number) waits_.end(entry_);
  }
  StreamWait(const StreamWait &) = delete;
  StreamWait &operator=(const StreamWait &) = delete;
  // Called regularly.
  void look(std::optional<uint32_t> awaited_rank, const Awaited &awaited);

 private:
  StreamWaits &waits_;
  StreamWaits::StreamWait entry_;
};

// One wait of this rank's caller.
class ShownWait {
 public:
  ShownWait(const Waits &waits, uint32_t world_size, uint32_t rank)
      : entries_(waits), world_size_(world_size), rank_(rank) {}
  ~ShownWait() { hide(); }
  ShownWait(const ShownWait &) = delete;
  ShownWait &operator=(const ShownWait &) = delete;

  // Called regularly. Returns the ranks of a cycle of waiting callers to which this rank belongs; empty: there is
  // none.
  std::vector<uint32_t> look(std::optional<uint32_t> awaited_rank, const std::string &call, const Awaited &awaited);
  // Does the same for the wait of a stream. If `stream` is empty, the stream does not wait, and the shown wait is
  // hidden.
  std::vector<uint32_t> look_through(const std::optional<StreamWaits::StreamWait> &stream, const std::string &call);
  std::string text(uint32_t rank) const { return entries_.text(rank); }  // the text that `rank` shows

 private:
  struct SeenWait {
    uint32_t rank;
    uint64_t wait_and_looks;
  };
  void show(std::optional<uint32_t> awaited_rank, Late late) noexcept;
  void hide() noexcept;
  void show_text(const std::string &call, const std::string &what);
  bool in_cycle() const noexcept;
  std::vector<uint32_t> find_cycle();

  Waits entries_;
  uint32_t world_size_, rank_;
  bool shown_ = false, text_shown_ = false;
  uint64_t stream_number_ = 0, stream_looks_ = 0;
  std::vector<SeenWait> suspects_;
};

}  // namespace fsdp::membership
