// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "perf/bench.h"

namespace perf {
namespace {

void copy_memcpy(std::byte *to, const std::byte *from, uint64_t bytes) { std::memcpy(to, from, bytes); }

#if defined(__x86_64__)
void copy_string(std::byte *to, const std::byte *from, uint64_t bytes) {
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}

// Whole pages, so there is no rest.
void copy_non_temporal(std::byte *to, const std::byte *from, uint64_t bytes) {
  for (uint64_t i = 0; i + 16 <= bytes; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i *>(to + i), _mm_load_si128(reinterpret_cast<const __m128i *>(from + i)));
  _mm_sfence();
}
#endif

struct Kind {
  const char *name;
  void (*copy)(std::byte *, const std::byte *, uint64_t);
};
constexpr Kind kinds[] = {
    {"memcpy", copy_memcpy},
#if defined(__x86_64__)
    {"rep movsb", copy_string},
    {"non-temporal", copy_non_temporal},
#endif
};

}  // namespace

// The kind is chosen from all ranks copying at once.
CopyReference::CopyReference(Bench &bench, uint64_t bytes)
    : from_(bench.member.device->allocate(bytes, "copy reference, source")),
      to_(bench.member.device->allocate(bytes, "copy reference, target")),
      bytes_(bytes) {
  std::memset(from_->data(), 1, bytes);
  std::array<double, std::size(kinds)> best;
  best.fill(1e9);
  for (int round = 0; round < 3; ++round)
    for (kind_ = 0; kind_ < std::size(kinds); ++kind_) {
      const Work copy = [this] { (*this)(); };
      const uint64_t repeats = std::max<uint64_t>((uint64_t{4} << 20) / bytes_, 1);
      best[kind_] = std::min(best[kind_], bench.lab.time(copy, repeats));
    }
  // The times are the slowest rank's, so every rank chooses alike.
  kind_ = static_cast<uint32_t>(std::min_element(best.begin(), best.end()) - best.begin());
}

void CopyReference::operator()() { kinds[kind_].copy(to_->data(), from_->data(), bytes_); }
const char *CopyReference::name() const { return kinds[kind_].name; }

}  // namespace perf
