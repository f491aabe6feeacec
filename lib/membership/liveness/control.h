// SPDX-License-Identifier: Apache-2.0
// The memory that all ranks of a node share from the start: which ranks are members, which are alive, and which one is
// to blame if the job fails. The first compare-and-swap on the verdict decides; every survivor reports the rank and the
// text of that verdict.
//
// In a job of several nodes a rank only suspects. Its node's leader sends the suspicion to the coordinator and writes
// the coordinator's verdict. If the leader does not answer within a second, the suspicion becomes the verdict.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/mapping.h"
#include "membership/liveness/posts.h"
#include "membership/liveness/waits.h"
#include "membership/verdict.h"

namespace fsdp::membership {

enum class Membership : uint32_t {
  absent,  // has not arrived yet
  member,
  left,  // closed its context in order
  gone   // destroyed its context without closing it
};

// The ranks of a job that share one control memory.
struct RanksHere {
  uint32_t count;
  bool first;  // rank 0 is one of them
};
inline RanksHere ranks_here(std::span<const uint32_t> ranks) noexcept {  // in ascending order
  return {static_cast<uint32_t>(ranks.size()), ranks.front() == 0};
}

class Control {
 public:
  // 34 bytes for each rank of the job, and 104 for each that posts to ranks here: see World::post.
  static uint64_t size_bytes(uint32_t world_size, RanksHere ranks) noexcept;
  // Makes a new control memory, which is passed to the other ranks.
  static Fd create(uint32_t world_size, RanksHere ranks);
  Control(const Fd &file, uint32_t world_size);

  uint32_t world_size() const noexcept { return world_size_; }
  // True if this node has more ranks than cores. Only the cores that the ranks may use count, for the ranks that have
  // arrived. In that case a waiting rank takes a core from another rank. False if the kernel does not tell which cores
  // these are.
  bool crowded() const noexcept {
    const uint32_t cores = head().core_count.load(std::memory_order_relaxed);
    return cores != 0 && head().ranks_here > cores;
  }
  // True if there is at least one core for each rank of this node. False also if the kernel does not tell which
  // cores the ranks may use.
  bool has_own_cores() const noexcept { return head().core_count.load(std::memory_order_relaxed) != 0 && !crowded(); }
  // True if there are at least two cores for each rank of this node, so a background thread need not use the caller's
  // core.
  bool has_spare_cores() const noexcept {
    return head().core_count.load(std::memory_order_relaxed) >= 2 * uint64_t{head().ranks_here};
  }
  Membership membership(uint32_t rank) const noexcept;
  void set_membership(uint32_t rank, Membership state) noexcept;
  // Has any rank left or gone? A reader that sees true also sees the new membership of that rank.
  bool any_left() const noexcept { return head().any_left.load(std::memory_order_acquire) != 0; }

  // -- life --
  // Notes that this process is `rank`: writes its process number and its host's name.
  void introduce(uint32_t rank) noexcept;
  void set_host(uint32_t rank, std::string_view name) noexcept;  // there is room for eight names
  int32_t process(uint32_t rank) const noexcept { return member(rank).process.load(std::memory_order_relaxed); }
  void set_process(uint32_t rank, int32_t process) noexcept { member(rank).process.store(process); }
  // "unknown" if the rank has not introduced itself, or there are too many names.
  std::string host(uint32_t rank) const;
  // Notes that the rank is on another node, so this memory gets its state late.
  void set_remote(uint32_t rank) noexcept { waits()[rank].late.store(Late::remote, std::memory_order_relaxed); }
  bool remote(uint32_t rank) const noexcept {
    return waits()[rank].late.load(std::memory_order_relaxed) == Late::remote;
  }
  // Notes that a rank of this host exchanges messages with `rank` of another host; the leaders of both hosts then watch
  // each other.
  void set_data_peer(uint32_t rank) noexcept;
  // Calls `found` for each rank for which any rank of this host has called set_data_peer().
  void find_data_peers(const std::function<void(uint32_t)> &found) const;
  // Writes a heartbeat: any number that differs from the previous one.
  void beat(uint32_t rank, uint64_t number) noexcept { member(rank).beat.store(number, std::memory_order_relaxed); }
  uint64_t last_beat(uint32_t rank) const noexcept { return member(rank).beat.load(std::memory_order_relaxed); }

  // -- blame --
  // Is there a leader that has not left the job? A leader is set only if the job has several nodes, before any rank may
  // accuse; it sends suspicions to the coordinator.
  bool has_leader() const noexcept;
  void set_leader(uint32_t rank) noexcept { head().leader.store(rank + 1, std::memory_order_release); }
  // Blames a rank; has no effect if a rank was blamed before. If there is a leader, this is only a suspicion, unless
  // the leader itself was lost.
  void accuse(const Accusation &accusation) noexcept;
  void accuse(FailureKind kind, uint32_t rank, const std::string &text) noexcept {
    accuse(accuse_rank(kind, rank, text));
  }
  // Writes the job's verdict. Has no effect if there is a verdict already.
  void decide(const Accusation &accusation) noexcept { write(head().verdict, accusation); }
  // Called regularly: turns a suspicion that is not answered in time into the verdict.
  void settle() noexcept;
  bool suspected() const noexcept { return head().suspicion.blame.load(std::memory_order_acquire) != 0; }
  Accusation suspicion() const noexcept { return read(head().suspicion); }
  bool accused() const noexcept { return head().verdict.blame.load(std::memory_order_acquire) != 0; }
  // The verdict as the error that rank `self` returns.
  Error verdict(uint32_t self) const { return error_of(read(head().verdict), self); }
  Accusation verdict() const noexcept { return read(head().verdict); }
  // The waits of the ranks' callers.
  Waits waits() const noexcept;
  // The posts of ranks, which others may read.
  Posts posts() const noexcept;

 private:
  // Written once, by the rank that wins the compare-and-swap.
  struct alignas(64) AccusationSlot {
    std::atomic<uint64_t> blame;  // kind | rank << 32
    std::atomic<uint32_t> ready;
    std::atomic<uint64_t> since_ms;
    Accusation accusation;
  };
  // Stored by number, because containers on one host may each have a host name of their own.
  struct HostName {
    std::atomic<uint64_t> hash;  // hash of the name; 0: no name
    SharedText<112> text;
  };
  struct ControlHead {
    uint64_t magic;
    uint32_t version, world_size, ranks_here;
    AccusationSlot verdict, suspicion;
    std::atomic<uint32_t> leader;     // the leader's rank plus 1; 0: none
    std::atomic<uint64_t> cores[16];  // one bit for each core that any rank may use
    std::atomic<uint32_t> core_count, any_left;
    std::atomic<uint64_t> data_peers[RankSet::most / 64];
    HostName hosts[8];
    WaitTexts wait_texts;
    PostRoom posts;
  };
  void add_cores() noexcept;
  struct Member {
    std::atomic<uint16_t> state, host;  // host: number of its name plus 1; 0: unknown
    std::atomic<int32_t> process;
    std::atomic<uint64_t> beat;
  };
  static_assert(sizeof(Member) == 16);
  bool is_loss_of_leader(const Accusation &accusation) const noexcept;
  static bool write(AccusationSlot &slot, const Accusation &accusation) noexcept;
  static Accusation read(const AccusationSlot &slot) noexcept;
  ControlHead &head() const noexcept { return *reinterpret_cast<ControlHead *>(memory_.data()); }
  // The memory has, in this order, the head, members, waits, posts, and the numbers of the posts' entries.
  Member *members() const noexcept { return reinterpret_cast<Member *>(memory_.data() + sizeof(ControlHead)); }
  Member &member(uint32_t rank) const noexcept { return members()[rank]; }

  uint32_t world_size_;
  Mapping memory_;
};

}  // namespace fsdp::membership
