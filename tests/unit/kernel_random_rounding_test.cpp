// SPDX-License-Identifier: Apache-2.0
#include "kernel_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

std::vector<uint16_t> round_numbers(const std::vector<float> &from, const RoundingKey &key,
                                    const ElementNumbers &numbers, size_t offset = 0) {
  std::vector<float> moved(from.size() + offset);
  std::copy(from.begin(), from.end(), moved.begin() + static_cast<std::ptrdiff_t>(offset));
  std::vector<uint16_t> to(from.size() + offset + 1, 0xa5a5);
  kernels::round_randomly({moved.data() + offset, to.data() + offset, from.size(), key, numbers});
  EXPECT_EQ(to.back(), 0xa5a5);
  for (size_t i = 0; i < offset; ++i) EXPECT_EQ(to[i], 0xa5a5);
  return {to.begin() + static_cast<std::ptrdiff_t>(offset), to.end() - 1};
}

// Finds the random bits of an element one bit at a time, the highest first.
uint16_t random_bits_of(const RoundingKey &key, uint64_t element) {
  uint32_t found = 0;
  for (int bit = 15; bit >= 0; --bit) {
    const uint32_t wanted = found | 1u << bit;  // the value is rounded up exactly if the random bits are at least this
    const float value = fp32_of(0x3f800000 | (0x10000 - wanted));
    if (round_numbers({value}, key, {element, 1, 0})[0] == 0x3f81) found = wanted;
  }
  return static_cast<uint16_t>(found);
}

// These are the low halves of XXH64 of the names "layers.0.attention.wq", "bias" and "m".
constexpr uint32_t name_of_wq = 0x3B86BA67, name_of_bias = 0x3E889B45, name_of_m = 0x83A2B2E8;

TEST(KernelRandomRounding, RandomBitsOfElementsAreKnown) {
  constexpr uint16_t expected[] = {0xCC67, 0x6CF5, 0xD990, 0x5DA0, 0x585E, 0x3762, 0x64E4, 0x3B17,
                                   0x867D, 0xA72C, 0x25A1, 0xF9AC, 0x7DF5, 0x8A2E, 0x569D, 0xFE6F};
  on_every_target([&] {
    const RoundingKey key{0x0123456789ABCDEF, name_of_wq, 7};
    for (uint64_t e = 0; e < 16; ++e) {
      EXPECT_EQ(random_bits_of(key, e), expected[e]) << e;
      EXPECT_EQ(random_words(key, e / 8).half(e % 8), expected[e]) << e;
    }
    EXPECT_EQ(random_bits_of(key, (uint64_t{1} << 35) + 3), 0x0ABC);
    EXPECT_EQ(random_bits_of(key, (uint64_t{1} << 35) + 4), 0x81D7);
  });
  const RandomWords known = random_words({0, 0, 0}, 0);  // Philox 4x32-10 gives this known answer for zeros
  EXPECT_EQ(known.word[0], 0x6627E8D5u);
  EXPECT_EQ(known.word[1], 0xE169C58Du);
  EXPECT_EQ(known.word[2], 0xBC57AC4Cu);
  EXPECT_EQ(known.word[3], 0x9B00DBD8u);
}

TEST(KernelRandomRounding, NoFiniteNumberBecomesInfinite) {
  const float largest = 3.4e38f, infinite = HUGE_VALF;
  on_every_target([&] {
    for (const float value : {largest, -largest, infinite, -infinite}) {
      const uint16_t sign = value < 0 ? 0x8000 : 0, kept = std::isinf(value) ? 0x7f80 : 0x7f7f;
      for (const uint16_t to : round_numbers(std::vector<float>(4096, value), {42, 1, 1}, {0, 4096, 0}))
        ASSERT_EQ(to, sign | kept);
    }
    for (const uint32_t nan : {0x7fc00000u, 0xffc00001u, 0x7f800001u, 0xff81ffffu})
      for (const uint16_t to : round_numbers(std::vector<float>(100, fp32_of(nan)), {42, 1, 1}, {0, 100, 0}))
        ASSERT_EQ(to, nan >> 16 | 0x40);
  });
}

TEST(KernelRandomRounding, ANumberIsRoundedUpAsOftenAsItIsAboveTheLowerOne) {
  constexpr size_t count = 65536;
  on_every_target([] {
    size_t up = 0;
    for (const uint16_t to :
         round_numbers(std::vector<float>(count, 1.001953125f), {42, name_of_bias, 1}, {0, count, 0})) {
      ASSERT_TRUE(to == 0x3f80 || to == 0x3f81) << to;
      up += to == 0x3f81;
    }
    EXPECT_EQ(up, 16430u);
    for (const uint16_t to : round_numbers(std::vector<float>(4096, 1.0078125f), {42, name_of_bias, 1}, {0, 4096, 0}))
      ASSERT_EQ(to, 0x3f81);  // bf16 can represent this number, so it is not rounded
  });
}

TEST(KernelRandomRounding, AKnownMatrixHasItsKnownBits) {
  std::vector<float> x = matrix();
  for (float &value : x) value *= 1.0f / 3;
  on_every_target([&] {
    const auto to = round_numbers(x, {1, name_of_m, 1}, {0, x.size(), 0});
    EXPECT_EQ(crc32(to.data(), to.size() * 2), 0x5B26FA1Du);
  });
}

// The elements are those of a piece, or of a box in a larger tensor. Most pieces and rows begin or end within groups of
// 8.
TEST(KernelRandomRounding, SameBitsAsTheDefinition) {
  std::mt19937 random(5);
  std::vector<float> from(5000);
  for (float &value : from) value = random_value(random, Values::awkward);
  const RoundingKey key{0xfedcba9876543210, 0x89abcdef, 0x80000001};
  on_every_target([&] {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{64}, size_t{65}, size_t{1023}, size_t{5000}})
      for (const ElementNumbers numbers : {ElementNumbers{0, 5000, 0},
                                           {5, 5000, 0},
                                           {(uint64_t{1} << 35) - 77, 5000, 0},
                                           {3, 1, 7},
                                           {6, 13, 100},
                                           {1000, 48, 64},
                                           {9, 1030, 5001},
                                           {8, 96, 96}}) {
        const size_t offset = count % 4;
        const auto to =
            round_numbers({from.begin(), from.begin() + static_cast<std::ptrdiff_t>(count)}, key, numbers, offset);
        for (size_t i = 0; i < count; ++i) {
          const uint64_t e = numbers.at(i);
          ASSERT_EQ(to[i], round_randomly(fp32_bits(from[i]), random_words(key, e / 8).half(e % 8)))
              << i << " of " << count << ", element " << e;
        }
      }
  });
}

}  // namespace
}  // namespace fsdp::test
