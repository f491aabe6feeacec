// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/control.h"

#include <sched.h>

#include <bit>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/checked.h"

namespace fsdp::comm {
namespace {

constexpr uint64_t control_magic = 0x66736470'63746c31;  // "fsdpctl1"
constexpr uint32_t control_version = 3;

fsdp_status status_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::mismatch: return FSDP_MISMATCH;
    case Verdict::timeout: return FSDP_TIMEOUT;
    default: return FSDP_PEER_FAILED;
  }
}

// For the unlikely case that the rank that gave the verdict died before it had written the text.
std::string short_text(Verdict verdict, uint32_t rank) {
  switch (verdict) {
    case Verdict::died: return format_text("rank {} died", rank);
    case Verdict::left: return format_text("rank {} left the job", rank);
    case Verdict::aborted: return format_text("rank {} aborted", rank);
    case Verdict::mismatch: return format_text("rank {} called something else than its peers", rank);
    case Verdict::timeout: return format_text("rank {} has not come in time", rank);
    default: return format_text("rank {} failed", rank);
  }
}

}  // namespace

uint64_t Control::size_bytes(uint32_t world_size) noexcept {
  return round_up(sizeof(Head) + world_size * (sizeof(Member) + sizeof(WaitEntry)), page_size());
}

void Control::initialize(const Fd &file, uint32_t world_size) {
  Mapping memory(file, size_bytes(world_size), Access::read_write, "the job's control memory");
  auto &head = *reinterpret_cast<Head *>(memory.data());
  head.magic = control_magic;
  head.version = control_version;
  head.world_size = world_size;
}

Control::Control(const Fd &file, uint32_t world_size)
    : world_size_(world_size), memory_(file, size_bytes(world_size), Access::read_write, "the job's control memory") {
  memory_.populate(0, memory_.size_bytes(), Access::read_write, "the job's control memory");
  if (head().magic != control_magic || head().version != control_version || head().world_size != world_size)
    fail(FSDP_SYSTEM, "the job's control memory is not of this version of the library, or not for {} ranks",
         world_size);
  add_cores();
}

// A launcher may have bound each rank to cores of its own. Who has added its cores last counts those of all.
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
  member(rank).state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

void Control::accuse(Verdict verdict, uint32_t rank, const std::string &text) noexcept {
  uint64_t none = 0;
  const uint64_t blame = static_cast<uint64_t>(verdict) | uint64_t{rank} << 32;
  if (!head().verdict.compare_exchange_strong(none, blame, std::memory_order_acq_rel)) return;
  const size_t length = std::min(text.size(), sizeof(Head::text) - 1);
  std::memcpy(head().text, text.data(), length);
  head().text[length] = '\0';
  head().text_ready.store(1, std::memory_order_release);
}

Error Control::verdict(uint32_t self) const {
  const uint64_t blame = head().verdict.load(std::memory_order_acquire);
  const auto kind = static_cast<Verdict>(blame & 0xff);
  const auto rank = static_cast<uint32_t>(blame >> 32);
  bool ready = false;
  for (int tries = 0; !(ready = head().text_ready.load(std::memory_order_acquire)) && tries < 50; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // A peer wrote it: never trust its end.
  const std::string text =
      ready ? std::string(head().text, ::strnlen(head().text, sizeof(Head::text))) : short_text(kind, rank);
  const fsdp_status status = kind == Verdict::aborted && rank == self ? FSDP_ABORTED : status_of(kind);
  return Error(status, text, static_cast<int32_t>(rank));
}

}  // namespace fsdp::comm
