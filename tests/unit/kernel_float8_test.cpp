// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include "float8_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

constexpr Float8Format formats[] = {e4m3, e5m2};

std::vector<uint8_t> narrowed(const std::vector<float> &from, const Float8Format &f) {
  std::vector<uint8_t> to(from.size());
  kernels::cast_to_float8(to.data(), f.format, from.data(), FSDP_FLOAT32, from.size());
  return to;
}

struct Vector {
  float value;
  uint8_t code;
};

void check_vectors(const std::vector<Vector> &vectors, const Float8Format &f) {
  for (const Vector &v : vectors) {
    EXPECT_EQ(float8_of(v.value, f), v.code) << v.value;  // computed by the reference
    EXPECT_EQ(f.mantissa_bits == 3 ? E4M3::stored(v.value) : E5M2::stored(v.value), v.code) << v.value;
    on_every_target([&] { EXPECT_EQ(narrowed({v.value}, f)[0], v.code) << v.value; });
  }
}

TEST(KernelFloat8, KnownValuesHaveTheirKnownCodes) {
  const float lowest = 0x1p-9f, inf = HUGE_VALF;
  check_vectors({{0x1p-10f, 0},
                 {std::nextafter(0x1p-10f, 1.0f), 1},
                 {lowest, 1},
                 {1.5f * lowest, 2},
                 {2.5f * lowest, 2},
                 {0.875f * 0x1p-6f, 7},
                 {0x1p-6f, 8},
                 {1, 0x38},
                 {1.0625f, 0x38},
                 {1.1875f, 0x3a},
                 {16, 0x58},
                 {17, 0x58},
                 {18, 0x59},
                 {19, 0x5a},
                 {448, 0x7e},
                 {463.99997f, 0x7e},
                 {464, 0x7e},
                 {1e9f, 0x7e},
                 {inf, 0x7e},
                 {-inf, 0xfe},
                 {-0.0f, 0x80},
                 {std::nanf(""), 0x7f},
                 {-std::nanf(""), 0xff}},
                e4m3);
  check_vectors({{0x1p-17f, 0},
                 {std::nextafter(0x1p-17f, 1.0f), 1},
                 {0x1p-16f, 1},
                 {0x1p-14f, 4},
                 {1, 0x3c},
                 {1.125f, 0x3c},
                 {1.375f, 0x3e},
                 {57344, 0x7b},
                 {61440, 0x7b},
                 {inf, 0x7b},
                 {-inf, 0xfb},
                 {std::nanf(""), 0x7e},
                 {-std::nanf(""), 0xfe}},
                e5m2);
}

static_assert(E4M3::stored(448) == 0x7e && E4M3::value(0x01) == 0x1p-9f && E5M2::value(0x7b) == 57344);

void check_codes(const Float8Format &f) {
  std::vector<uint8_t> codes(256);
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  std::vector<float> values(256);
  kernels::cast_from_float8(values.data(), FSDP_FLOAT32, codes.data(), f.format, 256);
  const std::vector<uint8_t> back = narrowed(values, f);
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    const bool infinite = f.mantissa_bits == 2 && (code & 0x7f) == 0x7c;
    const float scalar = f.mantissa_bits == 3 ? E4M3::value(byte) : E5M2::value(byte);
    EXPECT_EQ(std::bit_cast<uint32_t>(scalar), std::bit_cast<uint32_t>(values[code])) << code;
    if ((code & 0x7f) <= f.largest) {
      EXPECT_EQ(values[code], value_of(byte, f)) << code;
      EXPECT_EQ(std::signbit(values[code]), code >= 128) << code;
      EXPECT_EQ(back[code], code);
    } else if (infinite) {
      EXPECT_EQ(values[code], code < 128 ? HUGE_VALF : -HUGE_VALF) << code;
    } else {
      EXPECT_TRUE(std::isnan(values[code]) && std::signbit(values[code]) == (code >= 128)) << code;
      EXPECT_GT(back[code] & 0x7f, f.quiet - 1) << code;
      EXPECT_EQ(back[code] & 0x80, code & 0x80);
    }
  }
}

TEST(KernelFloat8, EveryCodeOnEveryTarget) {
  on_every_target([] {
    for (const Float8Format &f : formats) check_codes(f);
  });
}

TEST(KernelFloat8, WidensTo16Bits) {
  std::vector<uint8_t> codes(256);
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  on_every_target([&] {
    for (const Float8Format &f : formats)
      for (const fsdp_dtype dtype : {FSDP_BFLOAT16, FSDP_FLOAT16}) {
        std::vector<uint16_t> to(256);
        kernels::cast_from_float8(to.data(), dtype, codes.data(), f.format, 256);
        for (int code = 0; code < 256; ++code) {
          const float value = widen(to[code], exponent_bits(dtype));
          if ((code & 0x7f) <= f.largest)
            ASSERT_TRUE(same(value, static_cast<float>(value_of(static_cast<uint8_t>(code), f)))) << code;
          else
            ASSERT_FALSE(std::isfinite(value)) << code;
        }
      }
  });
}

TEST(KernelFloat8, Every16BitInputOnEveryTarget) {
  std::vector<uint16_t> from(65536);
  std::iota(from.begin(), from.end(), uint16_t{0});
  for (const Float8Format &f : formats)
    for (const fsdp_dtype dtype : {FSDP_BFLOAT16, FSDP_FLOAT16}) {
      std::vector<uint8_t> expected(from.size()), to(from.size());
      for (size_t i = 0; i < from.size(); ++i) expected[i] = float8_of(widen(from[i], exponent_bits(dtype)), f);
      on_every_target([&] {
        kernels::cast_to_float8(to.data(), f.format, from.data(), dtype, from.size());
        for (size_t i = 0; i < from.size(); ++i) ASSERT_EQ(to[i], expected[i]) << i << " of " << dtype_name(dtype);
      });
    }
}

// Tests every value from `first` on, `step` apart, with both signs.
void check_sweep(uint64_t first, uint64_t step, size_t count) {
  std::vector<float> from(2 * count);
  for (size_t i = 0; i < count; ++i) {
    from[2 * i] = std::bit_cast<float>(static_cast<uint32_t>(first + i * step));
    from[2 * i + 1] = -from[2 * i];
  }
  for (const Float8Format &f : formats) {
    const std::vector<uint8_t> to = narrowed(from, f);
    for (size_t i = 0; i < count; ++i) {
      const uint8_t expected = float8_of(from[2 * i], f);
      if (to[2 * i] == expected && to[2 * i + 1] == (expected | 0x80)) continue;
      FAIL() << std::hex << std::bit_cast<uint32_t>(from[2 * i]) << " became " << int{to[2 * i]} << " and "
             << int{to[2 * i + 1]} << ", not " << int{expected};
    }
  }
}

constexpr uint64_t magnitudes = uint64_t{1} << 31;
constexpr size_t sweep = 1 << 16;

TEST(KernelFloat8, SampledValuesMatchTheReference) {
  constexpr uint64_t step = sanitized ? 8191 : 509;  // a prime, which meets every exponent and rounding pattern
  for (uint64_t first = 0; first < magnitudes; first += sweep * step)
    check_sweep(first, step, std::min<uint64_t>(sweep, (magnitudes - first + step - 1) / step));
}

TEST(KernelFloat8, EveryFloatHasTheCodeOfTheReference) {
  if (!std::getenv("FSDP_TEST_ALL_CASTS")) GTEST_SKIP() << "set FSDP_TEST_ALL_CASTS to convert all 2^32 values";
  for (uint64_t first = 0; first < magnitudes && !HasFatalFailure(); first += sweep) check_sweep(first, 1, sweep);
}

TEST(KernelFloat8, ValuesAroundEveryTieMatchTheReference) {
  std::vector<float> from;
  for (const Float8Format &f : formats) {
    const std::vector<double> &values = finite_values(f);
    for (size_t i = 0; i + 1 < values.size(); ++i) {
      const auto tie = static_cast<float>((values[i] + values[i + 1]) / 2);
      for (const float value : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, HUGE_VALF)})
        from.insert(from.end(), {value, -value});
    }
  }
  on_every_target([&] {
    for (const Float8Format &f : formats) {
      const std::vector<uint8_t> to = narrowed(from, f);
      for (size_t i = 0; i < from.size(); ++i) ASSERT_EQ(to[i], float8_of(from[i], f)) << from[i];
    }
  });
}

void check_pair(const Float8Format &f, fsdp_dtype dtype, size_t count, size_t offset) {
  Elements from(dtype, count, offset);
  from.fill(static_cast<uint32_t>(count), Values::awkward);
  std::vector<uint8_t> to(offset + count + 1, 0xa5), expected = to;
  for (size_t i = 0; i < count; ++i) expected[offset + i] = float8_of(from[i], f);
  kernels::cast_to_float8(to.data() + offset, f.format, from.data(), dtype, count);
  ASSERT_EQ(to, expected) << count << " of " << dtype_name(dtype) << " at " << offset;

  Elements wide(dtype, count + 1, offset);
  write(wide.data(), dtype, count, 7);  // must not change
  kernels::cast_from_float8(wide.data(), dtype, to.data() + offset, f.format, count);
  for (size_t i = 0; i < count; ++i) {
    const uint8_t code = to[offset + i];
    if ((code & 0x7f) > f.largest) continue;
    ASSERT_EQ(double{wide[i]}, value_of(code, f)) << i;
  }
  ASSERT_EQ(wide[count], 7);
}

TEST(KernelFloat8, AnySizeAndOffsetMatchesTheReference) {
  on_every_target([] {
    for (const Float8Format &f : formats)
      for (const fsdp_dtype dtype : dtypes)
        for (size_t count = 0; count < 68; ++count)
          for (const size_t offset : {0, 1, 3}) check_pair(f, dtype, count, offset);
  });
}

TEST(KernelFloat8, ScalesOfE8m0AreTheirPowersOfTwo) {
  EXPECT_EQ(E8M0::value(0), 0x1p-127f);
  EXPECT_TRUE(std::isnan(E8M0::value(255)));
  for (int code = 0; code < 255; ++code) {
    const float value = E8M0::value(static_cast<uint8_t>(code));
    EXPECT_EQ(value, std::ldexp(1.0f, code - 127));
    EXPECT_EQ(E8M0::stored(value), code);
    EXPECT_EQ(E8M0::stored(std::nextafter(value, HUGE_VALF)), std::min(code + 1, 254));
  }
  EXPECT_EQ(E8M0::stored(0), 0);
  EXPECT_EQ(E8M0::stored(0x1p-149f), 0);
  EXPECT_EQ(E8M0::stored(0x1.fffffep127f), 254);
  EXPECT_EQ(E8M0::stored(HUGE_VALF), 254);
  EXPECT_EQ(E8M0::stored(std::nanf("")), 255);
}

#if defined(FSDP_HAS_FLOAT_MODES)
TEST(KernelFloat8, DoesNotDependOnTheCallersModes) {
  const std::vector<float> from = {0x1p-133f, 0x1p-10f,  0x1.8p-9f, 0x1.000002p-10f, 1.0625f,   1.1875f,
                                   -17.0f,    0x1p-17f,  -0.0f,     0x1.000002p-17f, -1.375f,   463.0f,
                                   61441.0f,  0x1.4p-9f, 0x1p-16f,  19.0f,           -0x1p-149f};
  on_every_target([&] {
    for (const Float8Format &f : formats) {
      std::vector<uint8_t> to(from.size());
      std::vector<float> wide(256);
      std::vector<uint8_t> codes(256);
      std::iota(codes.begin(), codes.end(), uint8_t{0});
      with_odd_modes([&] {
        kernels::cast_to_float8(to.data(), f.format, from.data(), FSDP_FLOAT32, from.size());
        kernels::cast_from_float8(wide.data(), FSDP_FLOAT32, codes.data(), f.format, 256);
      });
      for (size_t i = 0; i < from.size(); ++i) EXPECT_EQ(to[i], float8_of(from[i], f)) << from[i];
      for (int code = 0; code <= f.largest; ++code) EXPECT_EQ(wide[code], value_of(static_cast<uint8_t>(code), f));
    }
  });
}
#endif

}  // namespace
}  // namespace fsdp::test
