// SPDX-License-Identifier: Apache-2.0
#include "device/host/copy_policy.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fsdp::device::kernels {

// Measured with two processes that copied at the same time, in private memory and in shared mappings of 4 KiB pages. On
// Zen 5 the string instruction is the fastest at every size from 64 KiB on. On Xeon (Granite Rapids) it is the fastest
// up to 1 MiB. Above that, four pages side by side are 1.2 to 1.5 times as fast; from 16 MiB on, eight pages with
// non-temporal stores are 1.5 to 1.8 times as fast.
std::optional<CopyWay> find_measured_way(const Processor &processor, size_t bytes) noexcept {
  constexpr uint32_t zen5 = 0x1A, p6 = 6, granite_rapids = 0xAD;
  using enum Processor::Vendor;
  if (!processor.fast_strings) return std::nullopt;
  if (processor.vendor == amd && processor.family == zen5) return CopyWay::string;
  if (processor.vendor != intel || processor.family != p6 || processor.model != granite_rapids) return std::nullopt;
  if (bytes < size_t{1} << 20) return CopyWay::string;
  return bytes < size_t{16} << 20 ? CopyWay::pages : CopyWay::past_caches;
}

// Each round begins with another way. So if copies of two or four sizes alternate, no way gets only one of the sizes.
CopyChoice CopyTrial::next() noexcept {
  if (const uint32_t found = found_.load(std::memory_order_relaxed); found < copy_ways)
    return {static_cast<CopyWay>(found)};
  const uint32_t turn = begun_.fetch_add(1, std::memory_order_relaxed);
  return {static_cast<CopyWay>((turn + turn / ways_) % ways_), this};
}

void CopyTrial::note(CopyWay way, size_t bytes, std::chrono::nanoseconds time) noexcept {
  const uint64_t rate = static_cast<uint64_t>(time.count()) * 1'024'000 / bytes;
  std::atomic<uint64_t> &least = least_[static_cast<size_t>(way)];
  for (uint64_t before = least.load(); rate < before && !least.compare_exchange_weak(before, rate);) {
  }
  if (ended_.fetch_add(1) + 1 != rounds * ways_) return;
  const auto fastest = std::ranges::min_element(least_, {}, [](const auto &rate_of_way) { return rate_of_way.load(); });
  found_.store(static_cast<uint32_t>(fastest - least_.begin()), std::memory_order_relaxed);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

// Sanitizers do not check the accesses of the string instruction.
CopyChoice choose_copy(size_t) noexcept { return {CopyWay::library}; }

#else

namespace {

Processor ask_processor() noexcept {
  Processor processor;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0, &a, &b, &c, &d)) return processor;
  if (b == signature_INTEL_ebx) processor.vendor = Processor::Vendor::intel;
  if (b == signature_AMD_ebx) processor.vendor = Processor::Vendor::amd;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return processor;
  processor.family = (a >> 8 & 0xF) == 0xF ? 0xF + (a >> 20 & 0xFF) : a >> 8 & 0xF;
  processor.model = (a >> 4 & 0xF) | (a >> 12 & 0xF0);
  constexpr unsigned erms = 1u << 9;
  processor.fast_strings = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & erms);
#endif
  return processor;
}

// The ranges of sizes begin at 64 KiB, 256 KiB, 1 MiB, 4 MiB and 16 MiB.
struct Trials {
  explicit Trials(uint32_t ways)
      : by_size{CopyTrial(ways), CopyTrial(ways), CopyTrial(ways), CopyTrial(ways), CopyTrial(ways)} {}
  CopyTrial &of(size_t bytes) noexcept {
    const auto range = static_cast<size_t>(std::bit_width(bytes / least_chosen_bytes) - 1) / 2;
    return by_size[std::min(range, by_size.size() - 1)];
  }
  std::array<CopyTrial, 5> by_size;
};

}  // namespace

CopyChoice choose_copy(size_t bytes) noexcept {
  if (bytes < least_chosen_bytes) return {CopyWay::library};
  static const Processor processor = ask_processor();
  if (const auto way = find_measured_way(processor, bytes)) return {*way};
  static Trials trials(processor.fast_strings ? copy_ways : copy_ways - 1);
  return trials.of(bytes).next();
}

#endif

void copy_string(void *to, const void *from, size_t bytes) noexcept {
#if defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace fsdp::device::kernels
