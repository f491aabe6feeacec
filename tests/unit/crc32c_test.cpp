// SPDX-License-Identifier: Apache-2.0
// Tests CRC-32C with the examples of RFC 3720 (B.4), and with every length and alignment against its definition, one
// bit at a time.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "base/crc32c.h"

namespace fsdp {
namespace {

uint32_t by_definition(const std::vector<unsigned char> &bytes, size_t first, size_t count) {
  uint32_t crc = UINT32_MAX;
  for (size_t i = first; i < first + count; ++i)
    for (int bit = 0; bit < 8; ++bit) {
      const bool odd = (crc ^ bytes[i] >> bit) & 1;
      crc = crc >> 1 ^ (odd ? 0x82f63b78 : 0);
    }
  return ~crc;
}

TEST(Crc32c, IsThatOfTheRfc) {
  std::vector<unsigned char> rising(32), falling(32);
  for (unsigned char i = 0; i < 32; ++i) {
    rising[i] = i;
    falling[31 - i] = i;
  }
  const std::pair<std::vector<unsigned char>, uint32_t> examples[] = {
      {std::vector<unsigned char>(32, 0), 0x8a9136aa},
      {std::vector<unsigned char>(32, 0xff), 0x62a8ab43},
      {rising, 0x46dd794e},
      {falling, 0x113fdb5c},
      {{'1', '2', '3', '4', '5', '6', '7', '8', '9'}, 0xe3069283}};
  for (const auto &[bytes, wanted] : examples) {
    EXPECT_EQ(crc32c(0, bytes.data(), bytes.size()), wanted);
    EXPECT_EQ(crc32c_by_table(0, bytes.data(), bytes.size()), wanted);
  }
  EXPECT_EQ(crc32c(0, nullptr, 0), 0u);
}

TEST(Crc32c, OfAllLengthsAndPlacesAndOfParts) {
  std::minstd_rand random(32);
  std::vector<unsigned char> bytes(20'000);
  for (auto &byte : bytes) byte = static_cast<unsigned char>(random());
  std::vector<size_t> lengths{3071, 3072, 3073, 6144, 9216, 10'007, 16'384};
  for (size_t i = 0; i < 80; ++i) lengths.push_back(i);
  for (const size_t length : lengths)
    for (size_t first = 0; first < 9; ++first) {
      const uint32_t wanted = by_definition(bytes, first, length);
      ASSERT_EQ(crc32c(0, bytes.data() + first, length), wanted) << length << " bytes from " << first;
      ASSERT_EQ(crc32c_by_table(0, bytes.data() + first, length), wanted) << length << " bytes from " << first;
      const size_t part = length / 3;
      ASSERT_EQ(crc32c(crc32c(0, bytes.data() + first, part), bytes.data() + first + part, length - part), wanted);
    }
}

TEST(Crc32c, SeesEveryBit) {
  std::vector<unsigned char> bytes(3 * 1024 + 5, 0x5a);
  const uint32_t before = crc32c(0, bytes.data(), bytes.size());
  for (size_t bit = 0; bit < 8 * bytes.size(); bit += 7) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    ASSERT_NE(crc32c(0, bytes.data(), bytes.size()), before) << bit;
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
  }
}

}  // namespace
}  // namespace fsdp
