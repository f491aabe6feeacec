// SPDX-License-Identifier: Apache-2.0
#include "device/host/copy_policy.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fsdp::device::kernels {
namespace {

constexpr size_t KiB = 1024, MiB = 1024 * KiB;

// As the kernel divides the models of family 0x1A; the others are later processors.
bool is_zen5(const Processor &processor) noexcept {
  const uint32_t model = processor.model;
  return processor.vendor == Processor::Vendor::amd && processor.family == 0x1A &&
         (model <= 0x2F || (model >= 0x40 && model <= 0x4F) || (model >= 0x60 && model <= 0x7F));
}

bool is_granite_rapids(const Processor &processor) noexcept {
  return processor.vendor == Processor::Vendor::intel && processor.family == 6 && processor.model == 0xAD;
}

}  // namespace

Processor identify_processor() noexcept {
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

// Measured with two processes that copied at the same time, in private memory and in shared mappings of 4 KiB pages. On
// Zen 5 the string instruction is the fastest at every size from 64 KiB on. On Xeon (Granite Rapids) it is the fastest
// up to 1 MiB. Above that, four pages side by side are 1.2 to 1.5 times as fast; from 16 MiB on, eight pages with
// non-temporal stores are 1.5 to 1.8 times as fast.
std::optional<CopyWay> find_measured_way(const Processor &processor, size_t bytes) noexcept {
  if (!processor.fast_strings) return std::nullopt;
  if (is_zen5(processor)) return CopyWay::string;
  if (!is_granite_rapids(processor)) return std::nullopt;
  if (bytes < 1 * MiB) return CopyWay::string;
  return bytes < 16 * MiB ? CopyWay::pages : CopyWay::past_caches;
}

// What is written past the caches must be read from memory afterwards. The time of a copy does not show this, so only
// copies that the caches of a core would not keep are written past them.
std::span<const CopyWay> list_copy_ways(const Processor &processor, size_t bytes) noexcept {
  static constexpr CopyWay ways[] = {CopyWay::past_caches, CopyWay::library, CopyWay::pages, CopyWay::string};
  const std::span all(ways);
  const size_t first = bytes < 4 * MiB ? 1 : 0;
  return all.subspan(first, all.size() - first - (processor.fast_strings ? 0 : 1));
}

// Every second copy may find its source in the caches. So each way gets as many even copies as odd ones.
CopyChoice CopyTrial::next() noexcept {
  if (const uint32_t found = found_.load(std::memory_order_relaxed); found < copy_ways)
    return {static_cast<CopyWay>(found)};
  const uint32_t number = begun_.fetch_add(1, std::memory_order_relaxed);
  const auto ways = static_cast<uint32_t>(ways_.size());
  const uint32_t shift = ways % 2 == 0 ? number / ways : 0;
  return {ways_[(number + shift) % ways], this};
}

void CopyTrial::note(CopyWay way, size_t bytes, std::chrono::nanoseconds time) noexcept {
  const uint64_t rate = static_cast<uint64_t>(time.count()) * 1'024'000 / bytes;
  Times &times = times_[static_cast<size_t>(way)];
  const uint32_t place = times.count.fetch_add(1, std::memory_order_relaxed);
  if (place < copies_per_way) times.rates[place] = static_cast<uint32_t>(std::clamp<uint64_t>(rate, 1, UINT32_MAX - 1));
  if (ended_.fetch_add(1) + 1 == copies_per_way * ways_.size())
    found_.store(static_cast<uint32_t>(find_fastest()), std::memory_order_relaxed);
}

// The lower median. Returns UINT32_MAX if no time is known.
uint32_t CopyTrial::Times::median() const noexcept {
  std::array<uint32_t, copies_per_way> known{};
  size_t number = 0;
  for (const auto &rate : rates)
    if (const uint32_t one = rate; one != 0) known[number++] = one;
  if (number == 0) return UINT32_MAX;
  std::sort(known.begin(), known.begin() + number);
  return known[(number - 1) / 2];
}

// Another way replaces memcpy only if it is clearly faster.
CopyWay CopyTrial::find_fastest() const noexcept {
  const CopyWay fastest = *std::ranges::min_element(ways_, {}, [this](CopyWay way) { return of(way).median(); });
  const uint64_t rate = of(fastest).median();
  return rate + rate / 32 < of(CopyWay::library).median() ? fastest : CopyWay::library;
}

CopyTrials::CopyTrials(const Processor &processor) {
  for (size_t number = 0; number < count; ++number)
    trials_[number].emplace(list_copy_ways(processor, min_bytes(number)));
}

size_t CopyTrials::number_of(size_t bytes) noexcept {
  const auto power = static_cast<size_t>(std::bit_width(bytes / min_chosen_bytes) - 1);
  const size_t eighth = bytes / (min_chosen_bytes / 8 << power) - 8;
  return std::min(power * 8 + eighth, count - 1);
}

size_t CopyTrials::min_bytes(size_t number) noexcept { return (min_chosen_bytes / 8 << number / 8) * (8 + number % 8); }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FSDP_COPIES_ARE_CHECKED
#elif defined(__has_feature)  // clang
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define FSDP_COPIES_ARE_CHECKED
#endif
#endif

#if defined(FSDP_COPIES_ARE_CHECKED)

// Sanitizers do not check the accesses of the string instruction, so their builds use memcpy.
CopyChoice choose_copy(size_t) noexcept { return {CopyWay::library}; }

#else

CopyChoice choose_copy(size_t bytes) noexcept {
  if (bytes < min_chosen_bytes) return {CopyWay::library};
  static const Processor processor = identify_processor();
  if (const auto way = find_measured_way(processor, bytes)) return {*way};
  static CopyTrials trials(processor);
  return trials.for_size(bytes).next();
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
