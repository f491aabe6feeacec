// SPDX-License-Identifier: Apache-2.0
// Implements loads, stores and atomic operations, lane by lane.
#include <array>
#include <bit>
#include <utility>

#include "ptx/operations.h"
#include "ptx/runtime.h"
#include "ptx/warp.h"

namespace ptx {
namespace {

uint64_t atomics = 0;
using ByBytes = std::array<uint64_t, 65>;
ByBytes loads{}, stores{};
uint64_t prefetches = 0;

void count(ByBytes &accesses, const Instruction &i, const Warp &warp) {
  if (i.space == Space::global) accesses[i.count * i.bytes] += static_cast<uint64_t>(std::popcount(warp.active));
}

std::map<unsigned, uint64_t> take(ByBytes &accesses) {
  std::map<unsigned, uint64_t> taken;
  for (unsigned bytes = 0; bytes < accesses.size(); ++bytes)
    if (const uint64_t number = std::exchange(accesses[bytes], 0)) taken[bytes] = number;
  return taken;
}

template <class T, class Change>
void change(const Instruction &i, Warp &warp, Change changed) {
  each_lane(warp.active, [&](unsigned lane) {
    ++atomics;
    T *const at = reinterpret_cast<T *>(reach(i, warp, lane));
    const T before = *at;
    *at = changed(before, warp.lane<T>(i.from[1])[lane]);
    warp.lane<T>(i.to[0])[lane] = before;
  });
}

void add_u64(const Instruction &i, Warp &warp) {
  change<uint64_t>(i, warp, [](uint64_t a, uint64_t b) { return a + b; });
}
void max_u32(const Instruction &i, Warp &warp) {
  change<uint32_t>(i, warp, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}

}  // namespace

uint64_t take_atomics() { return std::exchange(atomics, 0); }

// A register wider than the loaded value is filled with zeros or with copies of the sign bit.
void load(const Instruction &i, Warp &warp) {
  count(loads, i, warp);
  each_lane(warp.active, [&](unsigned lane) {
    const std::byte *const from = reach(i, warp, lane);
    for (unsigned k = 0; k < i.count; ++k) {
      std::byte *const to = warp.registers + i.to[k] + lane * i.register_bytes;
      const bool ones = i.sign_extends && (from[(k + 1) * i.bytes - 1] & std::byte{0x80}) != std::byte{0};
      std::memset(to, ones ? 0xff : 0, i.register_bytes);
      std::memcpy(to, from + k * i.bytes, i.bytes);
    }
  });
}

void store(const Instruction &i, Warp &warp) {
  count(stores, i, warp);
  each_lane(warp.active, [&](unsigned lane) {
    std::byte *const to = reach(i, warp, lane);
    for (unsigned k = 0; k < i.count; ++k)
      std::memcpy(to + k * i.bytes, warp.registers + i.to[k] + lane * i.register_bytes, i.bytes);
  });
}

void prefetch(const Instruction &i, Warp &warp) {
  each_lane(warp.active, [&](unsigned lane) {
    ++prefetches;
    reach(i, warp, lane);
  });
}

Accesses take_accesses() { return {take(loads), take(stores)}; }
uint64_t take_prefetches() { return std::exchange(prefetches, 0); }

std::optional<Run> find_atomic(std::string_view name) {
  if (name == "atom.global.add.u64") return add_u64;
  if (name == "atom.global.max.u32") return max_u32;
  return std::nullopt;
}

}  // namespace ptx
