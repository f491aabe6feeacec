// SPDX-License-Identifier: Apache-2.0
// What all ranks of a job share from the start: who is in, and who is to blame if it fails. The first compare-and-swap
// on the verdict decides; every survivor reports that rank and that text.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"
#include "comm/shm/mapping.h"
#include "comm/shm/waits.h"

namespace fsdp::comm {

enum class Verdict : uint32_t { none, died, left, aborted, failed, mismatch, timeout };

enum class Membership : uint32_t {
  absent,  // has not come yet
  member,
  left,  // in good order
  gone   // destroyed its context without closing it
};

class Control {
 public:
  static uint64_t size_bytes(uint32_t world_size) noexcept;
  // Of a fresh file, before it is passed on.
  static void initialize(const Fd &file, uint32_t world_size);
  Control(const Fd &file, uint32_t world_size);

  uint32_t world_size() const noexcept { return world_size_; }
  // More ranks than the cores that those which have come may use between them: a waiting rank keeps another from
  // coming. False if the kernel does not say which.
  bool crowded() const noexcept {
    const uint32_t cores = head().core_count.load(std::memory_order_relaxed);
    return cores != 0 && world_size_ > cores;
  }
  Membership membership(uint32_t rank) const noexcept;
  void set_membership(uint32_t rank, Membership state) noexcept;

  // Blame a rank; without effect if somebody was blamed before.
  void accuse(Verdict verdict, uint32_t rank, const std::string &text) noexcept;
  bool accused() const noexcept { return head().verdict.load(std::memory_order_acquire) != 0; }
  // The error that rank `self` reports for it.
  Error verdict(uint32_t self) const;
  // What the ranks' callers wait for: one entry a rank.
  WaitEntry *waits() const noexcept { return reinterpret_cast<WaitEntry *>(&member(world_size_)); }

 private:
  struct Head {
    uint64_t magic;
    uint32_t version, world_size;
    alignas(64) std::atomic<uint64_t> verdict;  // kind | rank << 32
    std::atomic<uint32_t> text_ready;
    char text[944];
    std::atomic<uint64_t> cores[16];  // one bit for each core that any rank may use
    std::atomic<uint32_t> core_count;
  };
  void add_cores() noexcept;
  struct alignas(64) Member {
    std::atomic<uint32_t> state;
  };
  Head &head() const noexcept { return *reinterpret_cast<Head *>(memory_.data()); }
  Member &member(uint32_t rank) const noexcept {
    return reinterpret_cast<Member *>(memory_.data() + sizeof(Head))[rank];
  }

  uint32_t world_size_;
  Mapping memory_;
};

}  // namespace fsdp::comm
