// SPDX-License-Identifier: Apache-2.0
#include "membership/liveness/control.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <functional>
#include <thread>

#include "base/checked.h"
#include "base/failure.h"

namespace fsdp::membership {
namespace {

constexpr uint64_t control_magic = 0x66736470'63746c31;  // "fsdpctl1"
constexpr uint32_t control_version = 10;

constexpr uint64_t answer_ms = 1000;  // time for a leader to get the job's verdict
constexpr const char *what = "the job's control memory";

// See World::post.
uint32_t posting_ranks(uint32_t world_size, RanksHere ranks) noexcept {
  return ranks.first ? world_size : std::min(world_size, ranks.count + 1);
}

uint64_t size_of(const Fd &file) {
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail_errno(errno, what);
  return static_cast<uint64_t>(status.st_size);
}

}  // namespace

uint64_t Control::size_bytes(uint32_t world_size, RanksHere ranks) noexcept {
  const uint64_t each = sizeof(Member) + sizeof(WaitEntry) + sizeof(uint16_t);
  return round_up(sizeof(ControlHead) + world_size * each + posting_ranks(world_size, ranks) * sizeof(PostEntry),
                  page_size());
}

Fd Control::create(uint32_t world_size, RanksHere ranks) {
  Fd file = create_memory_file(size_bytes(world_size, ranks), what);
  Mapping memory(file, size_bytes(world_size, ranks), Access::read_write, what);
  auto &head = *reinterpret_cast<ControlHead *>(memory.data());
  head.magic = control_magic;
  head.version = control_version;
  head.world_size = world_size;
  head.ranks_here = ranks.count;
  head.posts.entry_count = posting_ranks(world_size, ranks);
  return file;
}

Control::Control(const Fd &file, uint32_t world_size)
    : world_size_(world_size), memory_(file, size_of(file), Access::read_write, what) {
  memory_.populate(0, memory_.size_bytes(), Access::read_write, what);
  if (head().magic != control_magic || head().version != control_version || head().world_size != world_size)
    fail(FSDP_SYSTEM, "the job's control memory is not of this version of the library, or not for {} ranks",
         world_size);
  add_cores();
}

Waits Control::waits() const noexcept {
  return {reinterpret_cast<WaitEntry *>(members() + world_size_), &head().wait_texts};
}

Posts Control::posts() const noexcept {
  auto *entries = reinterpret_cast<PostEntry *>(reinterpret_cast<WaitEntry *>(members() + world_size_) + world_size_);
  auto *numbers = reinterpret_cast<std::atomic<uint16_t> *>(entries + head().posts.entry_count);
  return {head().posts, entries, numbers};
}

// A launcher may have bound each rank to cores of its own. The last rank that adds its cores counts the cores of all
// ranks.
void Control::add_cores() noexcept {
  cpu_set_t mine;
  if (::sched_getaffinity(0, sizeof mine, &mine) != 0) return;
  for (size_t cpu = 0; cpu < 64 * std::size(head().cores); ++cpu)
    if (CPU_ISSET(cpu, &mine)) head().cores[cpu / 64].fetch_or(uint64_t{1} << cpu % 64);
  uint32_t count = 0;
  for (const auto &word : head().cores) count += static_cast<uint32_t>(std::popcount(word.load()));
  uint32_t known = head().core_count.load();
  while (known < count && !head().core_count.compare_exchange_weak(known, count)) {
  }
}

Membership Control::membership(uint32_t rank) const noexcept {
  return static_cast<Membership>(member(rank).state.load(std::memory_order_acquire));
}

void Control::set_membership(uint32_t rank, Membership state) noexcept {
  member(rank).state.store(static_cast<uint16_t>(state), std::memory_order_release);
  if (state == Membership::left || state == Membership::gone) head().any_left.store(1, std::memory_order_release);
}

void Control::introduce(uint32_t rank) noexcept {
  member(rank).process.store(::getpid(), std::memory_order_relaxed);
  char name[sizeof(HostName::text)] = {};
  ::gethostname(name, sizeof name - 1);
  set_host(rank, name);
}

// Ranks that add the same name at the same time may all write it, because the bytes are the same.
void Control::set_host(uint32_t rank, std::string_view name) noexcept {
  const uint64_t hash = std::hash<std::string_view>()(name) | 1;
  for (uint16_t i = 0; i < std::size(head().hosts); ++i) {
    uint64_t known = 0;
    HostName &host = head().hosts[i];
    if (!host.hash.compare_exchange_strong(known, hash) && known != hash) continue;
    host.text.store(name);
    member(rank).host.store(static_cast<uint16_t>(i + 1), std::memory_order_release);
    return;
  }
  member(rank).host.store(0, std::memory_order_relaxed);
}

void Control::set_data_peer(uint32_t rank) noexcept {
  const uint64_t bit = uint64_t{1} << rank % 64;
  std::atomic<uint64_t> &word = head().data_peers[rank / 64];
  if (!(word.load(std::memory_order_relaxed) & bit)) word.fetch_or(bit, std::memory_order_relaxed);
}

void Control::find_data_peers(const std::function<void(uint32_t)> &found) const {
  for (uint32_t i = 0; i < (world_size_ + 63) / 64; ++i)
    for (uint64_t bits = head().data_peers[i].load(std::memory_order_relaxed); bits != 0; bits &= bits - 1)
      found(64 * i + static_cast<uint32_t>(std::countr_zero(bits)));
}

std::string Control::host(uint32_t rank) const {
  const uint32_t number = member(rank).host.load(std::memory_order_acquire);
  return number ? head().hosts[number - 1].text.load().copy() : "unknown";
}

bool Control::write(AccusationSlot &slot, const Accusation &accusation) noexcept {
  uint64_t none = 0;
  const uint64_t blame = static_cast<uint64_t>(accusation.kind) | uint64_t{static_cast<uint32_t>(accusation.rank)}
                                                                      << 32;
  if (!slot.blame.compare_exchange_strong(none, blame, std::memory_order_acq_rel)) return false;
  slot.since_ms.store(steady_ms(), std::memory_order_release);
  slot.accusation = accusation;
  slot.ready.store(1, std::memory_order_release);
  return true;
}

// The writer of the slot may have died before it had written all of the slot. In that case the first word tells enough.
Accusation Control::read(const AccusationSlot &slot) noexcept {
  for (int tries = 0; !slot.ready.load(std::memory_order_acquire) && tries < 50; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (slot.ready.load(std::memory_order_acquire)) return slot.accusation;
  const uint64_t blame = slot.blame.load(std::memory_order_acquire);
  return accuse_rank(static_cast<FailureKind>(blame & 0xff), static_cast<uint32_t>(blame >> 32), {});
}

bool Control::has_leader() const noexcept {
  const uint32_t leader = head().leader.load(std::memory_order_acquire);
  return leader != 0 && membership(leader - 1) == Membership::member;
}

bool Control::is_loss_of_leader(const Accusation &accusation) const noexcept {
  const bool lost = accusation.kind == FailureKind::died || accusation.kind == FailureKind::stopped;
  return lost && accusation.ranks.contains(head().leader.load(std::memory_order_acquire) - 1);
}

void Control::accuse(const Accusation &accusation) noexcept {
  if (is_loss_of_leader(accusation)) return decide(accusation);
  if (has_leader()) return accused() ? void() : void(write(head().suspicion, accusation));
  decide(suspected() ? suspicion() : accusation);  // a leader may have sent it on before it left
}

void Control::settle() noexcept {
  if (!suspected() || accused()) return;
  const AccusationSlot &slot = head().suspicion;
  const uint64_t since = slot.since_ms.load(std::memory_order_acquire);
  if (since == 0) return;  // being written
  if (steady_ms() - since >= answer_ms) decide(read(slot));
}

}  // namespace fsdp::membership
