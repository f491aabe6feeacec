// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <numeric>

#include "kernel_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

// Compares a block of conversions with the reference, for values from `first` on, `step` apart.
void check_narrow(uint32_t first, uint64_t step, size_t count) {
  std::vector<float> from(count);
  std::vector<uint16_t> bf16(count), fp16(count);
  for (size_t i = 0; i < count; ++i) from[i] = std::bit_cast<float>(static_cast<uint32_t>(first + i * step));
  kernels::cast(bf16.data(), FSDP_BFLOAT16, from.data(), FSDP_FLOAT32, count);
  kernels::cast(fp16.data(), FSDP_FLOAT16, from.data(), FSDP_FLOAT32, count);
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    const bool right = bf16[i] == narrow(from[i], 8) && fp16[i] == narrow(from[i], 5);
    if (right || wrong++ > 3) continue;
    ADD_FAILURE() << std::hex << std::bit_cast<uint32_t>(from[i]) << " became bf16 " << bf16[i] << " not "
                  << narrow(from[i], 8) << ", fp16 " << fp16[i] << " not " << narrow(from[i], 5);
  }
}

TEST(KernelCast, ReferenceIsRight) {
  EXPECT_EQ(narrow(1.0f, 8), 0x3f80);
  EXPECT_EQ(narrow(1.0f, 5), 0x3c00);
  EXPECT_EQ(narrow(65504.0f, 5), 0x7bff);
  EXPECT_EQ(narrow(65519.996f, 5), 0x7bff);
  EXPECT_EQ(narrow(65520.0f, 5), 0x7c00);
  EXPECT_EQ(narrow(0x1p-24f, 5), 0x0001);
  EXPECT_EQ(narrow(0x1p-25f, 5), 0x0000);
  EXPECT_EQ(narrow(0x1.8p-24f, 5), 0x0002);
  EXPECT_EQ(widen(0x0001, 5), 0x1p-24f);
  EXPECT_EQ(widen(0xfbff, 5), -65504.0f);
}

TEST(KernelCast, NarrowsSampledValues) {
  constexpr uint64_t step = sanitized ? 4099 : 257;  // primes: at 257, 16.7 million samples with every rounding pattern
  constexpr size_t block = 1 << 18;
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += block * step)
    check_narrow(static_cast<uint32_t>(first), step,
                 std::min<uint64_t>(block, ((uint64_t{1} << 32) - first + step - 1) / step));
}

TEST(KernelCast, NarrowsEveryValue) {
  if (!std::getenv("FSDP_TEST_ALL_CASTS")) GTEST_SKIP() << "set FSDP_TEST_ALL_CASTS to convert all 2^32 values";
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += 1 << 20)
    check_narrow(static_cast<uint32_t>(first), 1, 1 << 20);
}

TEST(KernelCast, NarrowsTheBoundariesOfEveryExponent) {
  std::vector<uint32_t> tails;
  for (const uint32_t at : {0u, 0x0fffu, 0x1fffu, 0x2fffu, 0x7fffu, 0x17fffu, 0xffffu, 0x3fffffu, 0x7fefffu, 0x7f7fffu})
    for (uint32_t delta = 0; delta < 4; ++delta) tails.push_back((at + delta) & 0x7fffff);
  for (const uint32_t bit : {0x7ffffeu, 0x7fffffu, 0x400000u, 0x000001u}) tails.push_back(bit);
  std::vector<float> from;
  for (uint32_t head = 0; head < 512; ++head)
    for (const uint32_t tail : tails) from.push_back(std::bit_cast<float>(head << 23 | tail));
  on_every_target([&] {
    std::vector<uint16_t> to(from.size());
    for (const fsdp_dtype dtype : {FSDP_BFLOAT16, FSDP_FLOAT16}) {
      kernels::cast(to.data(), dtype, from.data(), FSDP_FLOAT32, from.size());
      for (size_t i = 0; i < from.size(); ++i) ASSERT_EQ(to[i], narrow(from[i], exponent_bits(dtype))) << from[i];
    }
  });
}

TEST(KernelCast, WidensEveryValueOnEveryTarget) {
  std::vector<uint16_t> from(65536);
  std::iota(from.begin(), from.end(), uint16_t{0});
  std::vector<uint32_t> to(from.size());
  on_every_target([&] {
    for (const fsdp_dtype dtype : {FSDP_BFLOAT16, FSDP_FLOAT16}) {
      kernels::cast(to.data(), FSDP_FLOAT32, from.data(), dtype, from.size());
      for (size_t i = 0; i < from.size(); ++i)
        ASSERT_EQ(to[i], std::bit_cast<uint32_t>(widen(from[i], exponent_bits(dtype)))) << i;
    }
  });
}

void check_cast(fsdp_dtype to_dtype, fsdp_dtype from_dtype, size_t count, size_t offset) {
  Elements from(from_dtype, count, offset), to(to_dtype, count + 1, offset), expected(to_dtype, count + 1, offset);
  from.fill(static_cast<uint32_t>(count), Values::awkward);
  for (size_t i = 0; i < count; ++i) write(expected.data(), to_dtype, i, from[i]);
  write(to.data(), to_dtype, count, 7);  // must not change
  write(expected.data(), to_dtype, count, 7);
  kernels::cast(to.data(), to_dtype, from.data(), from_dtype, count);
  ASSERT_EQ(std::memcmp(to.data(), expected.data(), (count + 1) * dtype_size(to_dtype)), 0)
      << dtype_name(from_dtype) << " to " << dtype_name(to_dtype) << ", " << count << " at " << offset;
}

TEST(KernelCast, AllPairsSizesAndOffsetsMatchTheReference) {
  on_every_target([] {
    for (const fsdp_dtype to : dtypes)
      for (const fsdp_dtype from : dtypes)
        for (size_t count = 0; count < 68; ++count)
          for (const size_t offset : {0, 1, 3}) check_cast(to, from, count, offset);
  });
}

TEST(KernelCast, LargeCastsOfAllPairsMatchTheReference) {
  constexpr size_t count = (kernels::streaming_bytes / 2) + 13;  // bypasses the caches for 16-bit outputs, too
  on_every_target([] {
    check_cast(FSDP_BFLOAT16, FSDP_FLOAT32, count, 1);
    check_cast(FSDP_FLOAT32, FSDP_FLOAT16, count, 3);
    check_cast(FSDP_FLOAT16, FSDP_BFLOAT16, count, 5);
  });
}

#if defined(FSDP_HAS_FLOAT_MODES)
TEST(KernelCast, DoesNotDependOnTheCallersModes) {
  on_every_target([] {
    const float from[] = {0x1p-133f, 0x1p-24f, 1.0f + 0x1p-9f, 0x1.8p-25f, -0.0f};
    uint16_t bf16[5], fp16[5];
    float wide[5];
    with_odd_modes([&] {
      kernels::cast(bf16, FSDP_BFLOAT16, from, FSDP_FLOAT32, 5);
      kernels::cast(fp16, FSDP_FLOAT16, from, FSDP_FLOAT32, 5);
      kernels::cast(wide, FSDP_FLOAT32, fp16, FSDP_FLOAT16, 5);
    });
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(bf16[i], narrow(from[i], 8)) << i;
      EXPECT_EQ(fp16[i], narrow(from[i], 5)) << i;
      EXPECT_TRUE(same(wide[i], widen(fp16[i], 5))) << i;
    }
  });
}
#endif

}  // namespace
}  // namespace fsdp::test
