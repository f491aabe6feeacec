// SPDX-License-Identifier: Apache-2.0
// Tests FP8 with fp32 scales: one for a tensor, or one for 128 x 128 numbers.
#include "float8_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

TEST(KernelFp8, CurrentScalingOfTwoShards) {
  const float shards[2][3] = {{3, -3, 0.001f}, {5, 4.99f, 1e-6f}};
  const uint8_t expected[2][3] = {{0x78, 0xf8, 0x1b}, {0x7e, 0x7e, 0x00}};
  on_every_target([&] {
    const float amaxes[] = {kernels::find_amax(shards[0], 3, false), kernels::find_amax(shards[1], 3, false)};
    EXPECT_EQ(amaxes[0], 3);
    EXPECT_EQ(amaxes[1], 5);
    float scale = 0, scale_inv = 0;
    kernels::find_fp8_scales({amaxes, 2, 1, false, &scale, &scale_inv});
    EXPECT_EQ(scale, std::bit_cast<float>(0x42b33333));
    EXPECT_EQ(scale_inv, std::bit_cast<float>(0x3c36db6e));
    for (int rank = 0; rank < 2; ++rank) {
      uint8_t codes[3];
      kernels::quantize_fp8({shards[rank], 3, false, &scale, codes});
      for (int i = 0; i < 3; ++i) EXPECT_EQ(codes[i], expected[rank][i]) << rank << ' ' << i;
    }
  });
}

// Each tensor's scale comes from the largest amax of any rank. Inf counts as the largest, and a rank without a part of
// the tensor has 0.
TEST(KernelFp8, ScalesOfWhatRanksHave) {
  const float amaxes[3][4] = {{2, 0, 0x1p-149f, 1}, {4, 0, 0, HUGE_VALF}, {3, 7, 0, 9}};
  float scales[4], inverses[4];
  kernels::find_fp8_scales({amaxes[0], 3, 4, false, scales, inverses});
  const float largest[] = {4, 7, 0x1p-149f, HUGE_VALF};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(scales[i], scale_for(largest[i], false)) << i;
    EXPECT_EQ(inverses[i], inverse(scales[i])) << i;
  }
}

TEST(KernelFp8, TheLargestMagnitudeIsFound) {
  on_every_target([] {
    for (const size_t count : {0, 1, 5, 31, 64, 67, 1000})
      for (const size_t offset : {0, 1, 3})
        for (size_t at = 0; at < count; at += count / 5 + 1) {
          Elements x(FSDP_FLOAT32, count, offset);
          for (size_t i = 0; i < count; ++i) x.floats()[i] = i % 2 ? 1.0f : -0x1p-149f;
          for (const float value : {-3.0f, 0x1.fffffep127f, -HUGE_VALF, -std::nanf("")}) {
            x.floats()[at] = value;
            const float expected = std::isfinite(value) ? std::fabs(value) : HUGE_VALF;
            ASSERT_EQ(kernels::find_amax(x.floats(), count, false), expected) << count << " at " << at;
          }
        }
    EXPECT_EQ(kernels::find_amax(nullptr, 0, false), 0);
    const float values[] = {-0x1p-149f, 1.00390625f, 0};
    EXPECT_EQ(kernels::find_amax(values, 1, false), 0x1p-149f);
    EXPECT_EQ(kernels::find_amax(values, 1, true), 0);
    EXPECT_EQ(kernels::find_amax(values, 3, true), 1);
    EXPECT_EQ(kernels::find_amax(values + 2, 1, false), 0);
  });
}

TEST(KernelFp8, ScalesFollowTheDefinition) {
  std::vector<float> amaxes = {0,         HUGE_VALF, std::nanf(""),  448, 449, 447, 1, 3, 5,
                               0x1p-149f, 0x1p-120f, 0x1.fffffep127f};
  std::mt19937 random(3);
  for (int i = 0; i < 10000; ++i) amaxes.push_back(std::fabs(std::bit_cast<float>(static_cast<uint32_t>(random()))));
  for (const bool power_of_two : {false, true}) {
    std::vector<float> scales(amaxes.size()), inverses(amaxes.size());
    kernels::find_fp8_scales({amaxes.data(), 1, amaxes.size(), power_of_two, scales.data(), inverses.data()});
    for (size_t i = 0; i < amaxes.size(); ++i) {
      ASSERT_EQ(scales[i], scale_for(amaxes[i], power_of_two)) << amaxes[i];
      ASSERT_EQ(inverses[i], inverse(scales[i])) << amaxes[i];
    }
  }
  EXPECT_EQ(scale_for(0x1p-149f, false), 0x1.fffffep127f);
  EXPECT_EQ(scale_for(449, true), 0.5f);
}

void check_quantize(size_t count, size_t offset, float scale, bool via_bf16) {
  Elements x(FSDP_FLOAT32, count, offset);
  x.fill(static_cast<uint32_t>(count), Values::awkward);
  std::vector<uint8_t> codes(offset + count + 1, 0xa5), expected = codes;
  for (size_t i = 0; i < count; ++i)
    expected[offset + i] = code_for(via_bf16 ? round_to(x[i], FSDP_BFLOAT16) : x[i], scale);
  kernels::quantize_fp8({x.floats(), count, via_bf16, &scale, codes.data() + offset});
  ASSERT_EQ(codes, expected) << count << " at " << offset << " by " << scale;
}

TEST(KernelFp8, CodesFollowTheDefinition) {
  on_every_target([] {
    for (const float scale : {1.0f, 89.6f, 0x1p-20f, 1e10f, 0x1p127f, 0x1.fffffep127f, 1.3e-36f})
      for (const size_t count : {0, 1, 7, 64, 67, 500})
        for (const size_t offset : {0, 1, 3})
          for (const bool via_bf16 : {false, true}) check_quantize(count, offset, scale, via_bf16);
  });
}

TEST(KernelFp8, ValuesFollowTheDefinition) {
  std::vector<uint8_t> codes(256 + 5);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  on_every_target([&] {
    for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16})
      for (const float scale_inv : {1.0f, 0.3f, 0x1p-149f, 0x1.fffffep127f}) {
        Elements to(dtype, codes.size() + 1, 1);
        write(to.data(), dtype, codes.size(), 7);
        kernels::dequantize_fp8(to.data(), dtype, {codes.data(), codes.size(), &scale_inv});
        for (size_t i = 0; i < codes.size(); ++i) {
          const bool nan = (codes[i] & 0x7f) == 0x7f;
          const auto value =
              nan ? std::nanf("") : static_cast<float>(value_of(codes[i], e4m3) * static_cast<double>(scale_inv));
          ASSERT_TRUE(same(to[i], round_to(value, dtype))) << int{codes[i]} << " by " << scale_inv;
        }
        ASSERT_EQ(to[codes.size()], 7);
      }
  });
}

std::vector<float> block_values(size_t rows, size_t columns, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> x(rows * columns);
  for (size_t i = 0; i < x.size(); ++i) {
    const int top = static_cast<int>(i / columns / 128 * 7 + i % columns / 128 * 11) % 60 - 30;
    x[i] = std::ldexp(std::normal_distribution<float>()(random), top - static_cast<int>(random() % 8));
  }
  return x;
}

void check_blocks(std::vector<float> x, size_t rows, size_t columns, bool power_of_two, bool via_bf16, size_t offset) {
  std::vector<float> rounded = x;
  if (via_bf16)
    for (float &value : rounded) value = round_to(value, FSDP_BFLOAT16);
  const Fp8Blocks expected = fp8_blocks_of(rounded, rows, columns, power_of_two);
  const size_t across = (columns + 127) / 128;
  std::vector<float> expected_back;
  for (size_t i = 0; i < expected.codes.size(); ++i) {
    const float scale = expected.scale_inv[i / columns / 128 * across + i % columns / 128];
    const bool nan = (expected.codes[i] & 0x7f) == 0x7f;
    expected_back.push_back(nan ? std::nanf("")
                                : static_cast<float>(value_of(expected.codes[i], e4m3) * double{scale}));
  }
  x.insert(x.begin(), offset, 0.0f);
  on_every_target([&] {
    std::vector<uint8_t> codes(offset + expected.codes.size() + 1, 0xa5);
    std::vector<float> scale_inv(expected.scale_inv.size() + 1, 7);
    kernels::quantize_fp8_blocks(
        {x.data() + offset, rows, columns, power_of_two, via_bf16, codes.data() + offset, scale_inv.data()});
    ASSERT_TRUE(
        std::equal(expected.codes.begin(), expected.codes.end(), codes.begin() + static_cast<std::ptrdiff_t>(offset)))
        << rows << " x " << columns << ", " << power_of_two << via_bf16;
    ASSERT_TRUE(std::equal(expected.scale_inv.begin(), expected.scale_inv.end(), scale_inv.begin()));
    ASSERT_TRUE(codes.back() == 0xa5 && scale_inv.back() == 7);
    std::vector<float> back(expected.codes.size() + 1, 7);
    kernels::dequantize_fp8_blocks(back.data(), FSDP_FLOAT32, {codes.data() + offset, scale_inv.data(), rows, columns});
    ASSERT_TRUE(std::equal(expected_back.begin(), expected_back.end(), back.begin(), same));
    ASSERT_EQ(back.back(), 7);
  });
}

TEST(KernelFp8, BlocksFollowTheDefinition) {
  for (const bool power_of_two : {false, true})
    for (const bool via_bf16 : {false, true}) {
      if (sanitized && via_bf16 != power_of_two) continue;
      check_blocks(block_values(128, 128, 1), 128, 128, power_of_two, via_bf16, 0);
      check_blocks(block_values(256, 300, 2), 256, 300, power_of_two, via_bf16, 1);
      check_blocks(block_values(130, 200, 3), 130, 200, power_of_two, via_bf16, 3);
      check_blocks(block_values(3, 5, 4), 3, 5, power_of_two, via_bf16, 0);
    }
}

// 448 makes the scale 1. Each number lies halfway between two numbers of bf16; the even one is a tie of E4M3.
TEST(KernelFp8, BlocksRoundedToBf16FirstRoundTiesToEven) {
  std::vector<float> x(128 * 128, 448.0f);
  for (uint32_t i = 0; i < 8; ++i)
    x[i] = std::bit_cast<float>(0x3f880000u + i / 2 * 0x100000u + (i % 2 ? 0x8000u : 0xffff8000u));
  check_blocks(x, 128, 128, false, true, 0);
}

TEST(KernelFp8, BlocksWithoutANumber) {
  std::vector<float> x = block_values(128, 512, 5);
  x[128 * 300 % x.size()] = std::nanf("");
  for (size_t i = 0; i < x.size(); ++i)
    if (i % 512 / 128 == 2) x[i] = i % 3 ? 0.0f : -0.0f;
  x[512 * 127 + 511] = -HUGE_VALF;
  for (const bool power_of_two : {false, true}) check_blocks(x, 128, 512, power_of_two, false, 0);
}

#if defined(FSDP_HAS_FLOAT_MODES)
TEST(KernelFp8, DoesNotDependOnTheCallersModes) {
  const std::vector<float> x = {0x1p-149f, -0x1.8p-130f, 0x1.234568p-127f, 0x1p-126f, 0x1.000002p-128f, 0x1.fp-131f};
  const Fp8Blocks expected = fp8_blocks_of(x, 2, 3, false);
  const float amax = 449, least = 0x1p-140f, large = 0x1p127f;
  const std::vector<float> subnormal = {0x1.8p-127f, -0x1.4p-128f, 0x1p-129f};
  const std::vector<uint8_t> one_and_a_half = {0x3c, 0xb2, 0x28}, codes_of_one = {0x38, 0xb8, 0x01};
  on_every_target([&] {
    std::vector<uint8_t> codes(6), by_large(3);
    std::vector<float> by_least(3), blocks_by_least(3);
    float scale_inv = 0, scales[2], inverses[2], found = 0;
    with_odd_modes([&] {
      kernels::quantize_fp8({subnormal.data(), 3, false, &large, by_large.data()});
      kernels::dequantize_fp8(by_least.data(), FSDP_FLOAT32, {codes_of_one.data(), 3, &least});
      kernels::dequantize_fp8_blocks(blocks_by_least.data(), FSDP_FLOAT32, {codes_of_one.data(), &least, 1, 3});
      found = kernels::find_amax(subnormal.data(), 3, false);
      kernels::quantize_fp8_blocks({x.data(), 2, 3, false, false, codes.data(), &scale_inv});
      kernels::find_fp8_scales({&amax, 1, 1, false, scales, inverses});
      kernels::find_fp8_scales({&least, 1, 1, false, scales + 1, inverses + 1});
    });
    EXPECT_EQ(by_large, one_and_a_half);
    EXPECT_EQ(by_least, (std::vector<float>{least, -least, 0x1p-149f}));
    EXPECT_EQ(blocks_by_least, by_least);
    EXPECT_EQ(found, subnormal[0]);
    EXPECT_EQ(codes, expected.codes);
    EXPECT_EQ(scale_inv, expected.scale_inv[0]);
    EXPECT_EQ(scales[0], scale_for(449, false));
    EXPECT_EQ(inverses[0], inverse(scales[0]));
    EXPECT_EQ(scales[1], 0x1.fffffep127f);
    EXPECT_EQ(std::bit_cast<uint32_t>(inverses[1]), 0x00200000u);  // a subnormal number
  });
}
#endif

// Only blocks with a scale of 1 are compared, including those of zeros and of 448.
TEST(KernelFp8, NumbersThatAreNoneAreCounted) {
  constexpr size_t rows = 200, columns = 300;
  std::vector<float> x(rows * columns, 3.0f), scales(2 * 3);
  for (size_t c = 0; c < 128; ++c) x[c] = 0;
  x[127 * columns + 127] = 448;
  std::vector<uint8_t> codes(x.size());
  const auto count = [&] {
    const Fp8BlockQuantize work{x.data(), rows, columns, false, false, codes.data(), scales.data()};
    kernels::quantize_fp8_blocks(work);
    return kernels::count_nonfinite_blocks(work);
  };
  EXPECT_EQ(count(), 0u);
  x[199 * columns + 299] = HUGE_VALF, x[130 * columns] = -std::nanf(""), x[131 * columns + 127] = -HUGE_VALF;
  EXPECT_EQ(count(), 3u);
  x[0] = std::nanf("");
  EXPECT_EQ(count(), 4u);
}

}  // namespace
}  // namespace fsdp::test
