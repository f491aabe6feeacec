// SPDX-License-Identifier: Apache-2.0
#include "base/crc32c.h"

#include <array>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace fsdp {
namespace {

constexpr uint32_t polynomial = 0x82f63b78;  // reflected

// steps[k][b] is the contribution of byte b to the CRC after k more bytes.
using Steps = std::array<std::array<uint32_t, 256>, 8>;
constexpr Steps make_steps() {
  Steps steps{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? polynomial : 0);
    steps[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (uint32_t b = 0; b < 256; ++b) steps[k][b] = steps[k - 1][b] >> 8 ^ steps[0][steps[k - 1][b] & 0xff];
  return steps;
}
constexpr Steps steps = make_steps();

uint64_t load(const unsigned char *from) noexcept {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

#if defined(__x86_64__) || defined(__ARM_FEATURE_CRC32)

// The instruction takes three cycles, and one can begin in each cycle. So three streams of this length are computed
// side by side, and are joined as if zeros had followed the earlier streams. CRCs are linear, so for each of a CRC's
// four bytes one table has the effect of the zeros on that byte.
constexpr uint64_t stream_bytes = 1024;
using Zeros = std::array<std::array<uint32_t, 256>, 4>;
constexpr Zeros make_zeros() {
  std::array<uint32_t, 32> of_bit{};
  for (size_t bit = 0; bit < 32; ++bit) {
    uint32_t crc = uint32_t{1} << bit;
    for (uint64_t i = 0; i < stream_bytes; ++i) crc = crc >> 8 ^ steps[0][crc & 0xff];
    of_bit[bit] = crc;
  }
  Zeros zeros{};
  for (size_t byte = 0; byte < 4; ++byte)
    for (size_t value = 0; value < 256; ++value)
      for (size_t bit = 0; bit < 8; ++bit)
        if (value >> bit & 1) zeros[byte][value] ^= of_bit[8 * byte + bit];
  return zeros;
}
constexpr Zeros zeros = make_zeros();

uint32_t after_zeros(uint32_t crc) noexcept {
  return zeros[0][crc & 0xff] ^ zeros[1][crc >> 8 & 0xff] ^ zeros[2][crc >> 16 & 0xff] ^ zeros[3][crc >> 24];
}

#if defined(__x86_64__)
#define FSDP_WITH_CRC __attribute__((target("sse4.2")))
FSDP_WITH_CRC inline uint32_t take(uint32_t crc, uint64_t word) noexcept {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
FSDP_WITH_CRC inline uint32_t take(uint32_t crc, unsigned char byte) noexcept { return _mm_crc32_u8(crc, byte); }
bool has_instruction() noexcept { return __builtin_cpu_supports("sse4.2"); }
#else
#define FSDP_WITH_CRC
inline uint32_t take(uint32_t crc, uint64_t word) noexcept { return __crc32cd(crc, word); }
inline uint32_t take(uint32_t crc, unsigned char byte) noexcept { return __crc32cb(crc, byte); }
bool has_instruction() noexcept { return true; }
#endif

FSDP_WITH_CRC uint32_t by_instruction(uint32_t crc, const unsigned char *at, uint64_t bytes) noexcept {
  for (; bytes >= 3 * stream_bytes; at += 3 * stream_bytes, bytes -= 3 * stream_bytes) {
    uint32_t second = 0, third = 0;
    for (uint64_t i = 0; i < stream_bytes; i += 8) {
      crc = take(crc, load(at + i));
      second = take(second, load(at + stream_bytes + i));
      third = take(third, load(at + 2 * stream_bytes + i));
    }
    crc = after_zeros(after_zeros(crc) ^ second) ^ third;
  }
  for (; bytes >= 8; at += 8, bytes -= 8) crc = take(crc, load(at));
  for (; bytes > 0; --bytes) crc = take(crc, *at++);
  return crc;
}

#endif

}  // namespace

uint32_t crc32c_by_table(uint32_t crc, const void *data, uint64_t bytes) noexcept {
  const auto *at = static_cast<const unsigned char *>(data);
  crc = ~crc;
  for (; bytes >= 8; at += 8, bytes -= 8) {
    const uint64_t word = load(at) ^ crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= steps[7 - i][word >> 8 * i & 0xff];
  }
  for (; bytes > 0; --bytes) crc = crc >> 8 ^ steps[0][(crc ^ *at++) & 0xff];
  return ~crc;
}

uint32_t crc32c(uint32_t crc, const void *data, uint64_t bytes) noexcept {
#if defined(__x86_64__) || defined(__ARM_FEATURE_CRC32)
  if (has_instruction()) return ~by_instruction(~crc, static_cast<const unsigned char *>(data), bytes);
#endif
  return crc32c_by_table(crc, data, bytes);
}

}  // namespace fsdp
