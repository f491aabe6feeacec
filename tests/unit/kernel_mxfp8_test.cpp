// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <numeric>

#include "float8_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

constexpr ScaleRule rules[] = {ScaleRule::round_up, ScaleRule::floor};

// The planes begin `offset` bytes after an aligned address, and the numbers `offset` elements after one.
struct Quantized {
  Quantized(const std::vector<float> &x, size_t rows, size_t columns, ScaleRule rule, bool via_bf16 = false,
            size_t offset = 0)
      : count(x.size()), offset(offset), from(x.size() + offset), bytes(4, std::vector<uint8_t>(x.size() + 80, mark)) {
    std::copy(x.begin(), x.end(), from.begin() + static_cast<std::ptrdiff_t>(offset));
    const auto at = [&](size_t i) { return bytes[i].data() + offset; };
    kernels::quantize_mxfp8({from.data() + offset, rows, columns, rule, via_bf16, at(0), at(1), at(2), at(3)});
  }
  Mxfp8Planes planes() const { return {plane(0, count), plane(1, count / 32), plane(2, count), plane(3, count / 32)}; }

 private:
  static constexpr uint8_t mark = 0xa5;
  std::vector<uint8_t> plane(size_t i, size_t length) const {
    const auto begin = bytes[i].begin() + static_cast<std::ptrdiff_t>(offset);
    const auto end = begin + static_cast<std::ptrdiff_t>(length);
    const auto touched = [](uint8_t byte) { return byte != mark; };
    EXPECT_FALSE(std::any_of(bytes[i].begin(), begin, touched) || std::any_of(end, bytes[i].end(), touched));
    return {begin, end};
  }
  size_t count, offset;
  std::vector<float> from;
  std::vector<std::vector<uint8_t>> bytes;
};

std::vector<float> filled(size_t count, const std::function<float(size_t)> &value) {
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) x[i] = value(i);
  return x;
}

struct Case {
  float amax;
  uint8_t up_scale, up_code, floor_scale, floor_code;
};
const Case cases[] = {{0, 0, 0, 0, 0},
                      {1, 119, 0x78, 119, 0x78},
                      {1.75f, 119, 0x7e, 119, 0x7e},
                      {1.7500001f, 120, 0x76, 119, 0x7e},
                      {448, 127, 0x7e, 127, 0x7e},
                      {448.00003f, 128, 0x76, 127, 0x7e},
                      {500, 128, 0x78, 127, 0x7e},
                      {512, 128, 0x78, 128, 0x78},
                      {896, 128, 0x7e, 128, 0x7e},
                      {0x1p-126f, 0, 0x40, 0, 0x40},
                      {0x1.fffffep127f, 247, 0x78, 246, 0x7e},
                      {HUGE_VALF, 254, 0x7e, 255, 0x7f},
                      {std::nanf(""), 255, 0x7f, 255, 0x7f}};

// One number of either sign stands at any place of a tile of zeros.
TEST(KernelMxfp8, TheLargestMagnitudeOfEachBlockIsFound) {
  on_every_target([] {
    for (const Case &c : cases)
      for (const size_t at : {size_t{0}, size_t{31 * 64 + 63}, size_t{17 * 64 + 33}})
        for (const float sign : {1.0f, -1.0f}) {
          std::vector<float> x(32 * 64);
          x[at] = std::copysign(c.amax, sign);
          for (const ScaleRule rule : rules) {
            const Mxfp8Planes planes = Quantized(x, 32, 64, rule).planes();
            const bool up = rule == ScaleRule::round_up;
            const uint8_t scale = up ? c.up_scale : c.floor_scale, code = up ? c.up_code : c.floor_code;
            const int signed_code = code | (sign < 0 && scale != 255 ? 0x80 : 0);
            EXPECT_EQ(planes.row_scales[at / 32], scale) << c.amax;
            EXPECT_EQ(planes.column_scales[at % 64], scale) << c.amax;
            EXPECT_EQ(planes.row[at], signed_code) << c.amax;
            EXPECT_EQ(planes.column[at], signed_code) << c.amax;
            const size_t beside = at / 32 * 32 + (at + 1) % 32, below = (at + 64) % x.size();
            EXPECT_EQ(planes.row[beside], scale == 255 ? 0x7f : 0) << c.amax;
            EXPECT_EQ(planes.column[below], scale == 255 ? 0x7f : 0) << c.amax;
            EXPECT_EQ(planes.column[beside], 0) << c.amax;
          }
        }
  });
}

struct Sums {
  ScaleRule rule;
  uint32_t row, row_scales, column, column_scales;
  std::vector<uint8_t> first_row_scales, first_column_scales;
  double error;
};

TEST(KernelMxfp8, AKnownMatrixHasItsKnownCodes) {
  const std::vector<float> x = matrix();
  ASSERT_EQ(crc32(x.data(), x.size() * 4), 0xbca3e316u);
  const std::vector<uint8_t> first = {0xf8, 0xee, 0x5e, 0x73, 0xf5, 0xe7, 0x6a, 0x76};
  on_every_target([&] {
    for (const Sums &sums :
         {Sums{
              rules[0], 0xb2b05f75, 0x5cd4c831, 0x235e7409, 0xf999b80d, {123, 124, 125}, {123, 123, 122, 123}, 0.02401},
          Sums{rules[1],
               0xb5d3e81a,
               0x530bbd52,
               0x31b58d67,
               0x5fccde2a,
               {123, 123, 125},
               {123, 123, 122, 122},
               0.04515}}) {
      const Mxfp8Planes planes = Quantized(x, matrix_rows, matrix_columns, sums.rule).planes();
      EXPECT_EQ(crc32(planes.row), sums.row);
      EXPECT_EQ(crc32(planes.row_scales), sums.row_scales);
      EXPECT_EQ(crc32(planes.column), sums.column);
      EXPECT_EQ(crc32(planes.column_scales), sums.column_scales);
      EXPECT_TRUE(std::equal(first.begin(), first.end(), planes.row.begin()));
      EXPECT_TRUE(std::equal(sums.first_row_scales.begin(), sums.first_row_scales.end(), planes.row_scales.begin()));
      EXPECT_TRUE(
          std::equal(sums.first_column_scales.begin(), sums.first_column_scales.end(), planes.column_scales.begin()));
      std::vector<float> back(x.size());
      kernels::dequantize_mxfp8(
          back.data(), FSDP_FLOAT32,
          {planes.row.data(), planes.row_scales.data(), matrix_rows, matrix_columns, Mxfp8Form::row});
      double wrong = 0, all = 0;
      for (size_t i = 0; i < x.size(); ++i)
        wrong += std::pow(double{back[i]} - x[i], 2), all += std::pow(double{x[i]}, 2);
      EXPECT_NEAR(std::sqrt(wrong / all), sums.error, 0.000005);
    }
  });
}

// Blocks have all magnitudes of fp32, and the numbers of a block span up to 2^40.
std::vector<float> wide_values(size_t rows, size_t columns, uint32_t seed, int least, int most) {
  std::mt19937 random(seed);
  std::vector<int> tops(rows / 32 * (columns / 32));
  for (int &top : tops) top = least + static_cast<int>(random() % static_cast<uint32_t>(most - least + 1));
  return filled(rows * columns, [&](size_t i) {
    const int top = tops[i / columns / 32 * (columns / 32) + i % columns / 32];
    const double part = (random() % 8 ? 1 + (random() & 0xffffff) * 0x1p-24 : random() % 2);
    return static_cast<float>(std::ldexp(random() % 2 ? part : -part, top - static_cast<int>(random() % 8 * 5)));
  });
}

std::vector<float> rounded_to_bf16(std::vector<float> x) {
  for (float &value : x) value = round_to(value, FSDP_BFLOAT16);
  return x;
}

void check(const std::vector<float> &x, size_t rows, size_t columns, size_t offset = 0) {
  for (const ScaleRule rule : rules)
    for (const bool via_bf16 : {false, true}) {
      if (sanitized && via_bf16 != (rule == ScaleRule::floor)) continue;
      const Mxfp8Planes expected = quantized(via_bf16 ? rounded_to_bf16(x) : x, rows, columns, rule);
      on_every_target([&] {
        ASSERT_EQ(Quantized(x, rows, columns, rule, via_bf16, offset).planes(), expected)
            << rows << " x " << columns << " at " << offset << ", rule " << static_cast<int>(rule) << ", via bf16 "
            << via_bf16;
      });
    }
}

TEST(KernelMxfp8, EveryShapeFollowsTheDefinition) {
  for (const size_t rows : {32, 64})
    for (const size_t columns : {32, 64, 96, 128, 160})
      for (const size_t offset : {0, 1, 3}) check(wide_values(rows, columns, 3, -20, 20), rows, columns, offset);
}

TEST(KernelMxfp8, EveryMagnitude) {
  for (int top = -149; top <= 127; top += 12 * sampled(4))
    check(wide_values(64, 96, 5, top, std::min(top + 12, 127)), 64, 96);
  check(wide_values(128, 128, 7, -149, 127), 128, 128);
}

// All scales of a tile are at, or beside, the smallest or the largest that the fast way computes without the
// definition. One number is rounded twice if scales around 2^-95 are computed in the fast way.
TEST(KernelMxfp8, MagnitudesAtTheEndsOfTheFastWay) {
  for (const int end : {-95, -87, 121})
    for (int top = end - 4; top <= end + 4; ++top) {
      std::vector<float> x = wide_values(32, 64, 21, top, top);
      x[9 * 64 + 5] = std::bit_cast<float>(0x8a37ffffu);
      check(x, 32, 64);
    }
}

// Numbers are so large that none becomes a subnormal code. Many lie halfway between two numbers of bf16, or beside a
// tie of E4M3.
TEST(KernelMxfp8, TilesOfNormalCodes) {
  std::mt19937 random(31);
  const auto draw = [&](int top) {
    const uint32_t rests[] = {0x80000, 0x88000, 0x78000, 0x7ffff, 0xf8000, static_cast<uint32_t>(random()) & 0xfffff};
    const uint32_t eighths = static_cast<uint32_t>(random()) & 0x700000;
    const float part = std::bit_cast<float>(0x3f800000u | eighths | rests[random() % 6]);
    const float number = random() % 2 ? part : -part;
    return std::ldexp(number, top - static_cast<int>(random() % 6));
  };
  for (const int top : {-110, -93, -87, -20, 0, 112, 118, 122, 127})
    for (const size_t offset : {0, 1}) check(filled(64 * 96, [&](size_t) { return draw(top); }), 64, 96, offset);
}

TEST(KernelMxfp8, NaNAndInfSpoilTheirBlocksOnly) {
  std::vector<float> x = wide_values(64, 160, 9, -3, 3);
  x[5 * 160 + 40] = HUGE_VALF, x[40 * 160 + 70] = std::nanf(""), x[41 * 160 + 150] = -HUGE_VALF;
  x[41 * 160 + 151] = -std::nanf("");
  check(x, 64, 160);
  const Mxfp8Planes planes = Quantized(x, 64, 160, ScaleRule::round_up).planes();
  EXPECT_EQ(kernels::count_nonfinite_scales(planes.row_scales.data(), planes.row_scales.size()), 3);
  EXPECT_EQ(kernels::count_nonfinite_scales(planes.column_scales.data(), planes.column_scales.size()), 4);
}

TEST(KernelMxfp8, ZerosKeepTheirSigns) {
  check(filled(32 * 64, [](size_t i) { return i % 3 ? 0.0f : -0.0f; }), 32, 64);
}

// The tile has no zeros, and one of its numbers is, or is not, a subnormal code. The other numbers must not change.
TEST(KernelMxfp8, OneNumberBelowTheOthers) {
  constexpr size_t at = 17 * 64 + 40;
  std::vector<float> x(32 * 64, 448.0f);
  std::vector<Mxfp8Planes> usual;
  for (const ScaleRule rule : rules) usual.push_back(quantized(x, 32, 64, rule));
  on_every_target([&] {
    for (int quarters = 1; quarters < 80; quarters += sampled(5))
      for (const float unit : {0x1p-11f, 0x1.000002p-11f})
        for (size_t rule = 0; rule < std::size(rules); ++rule) {
          Mxfp8Planes expected = usual[rule];
          x[at] = unit * static_cast<float>(quarters);
          expected.row[at] = mxfp8_element(x[at], expected.row_scales[at / 32]);
          expected.column[at] = mxfp8_element(x[at], expected.column_scales[at % 64]);
          ASSERT_EQ(Quantized(x, 32, 64, rules[rule]).planes(), expected) << x[at];
        }
  });
}

TEST(KernelMxfp8, CountsScalesThatAreNoNumbers) {
  std::vector<uint8_t> scales(1000);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(i);
  EXPECT_EQ(kernels::count_nonfinite_scales(scales.data(), 254), 0);
  EXPECT_EQ(kernels::count_nonfinite_scales(scales.data(), 255), 1);
  EXPECT_EQ(kernels::count_nonfinite_scales(scales.data(), 256), 2);
  EXPECT_EQ(kernels::count_nonfinite_scales(scales.data(), scales.size()), 6);
}

// 448 makes the scale 1.
TEST(KernelMxfp8, ByWayOfBf16RoundsTwice) {
  std::vector<float> x(32 * 32);
  x[0] = 448, x[1] = 1.064453125f, x[2] = 1.1865234375f;
  for (size_t i = 1; i < 32; ++i) x[i * 32 + 1] = x[i * 32 + 2] = 448;
  const Mxfp8Planes direct = Quantized(x, 32, 32, ScaleRule::round_up).planes();
  const Mxfp8Planes twice = Quantized(x, 32, 32, ScaleRule::round_up, true).planes();
  for (const auto *codes : {&direct.row, &direct.column}) {
    EXPECT_EQ((*codes)[1], 0x39);
    EXPECT_EQ((*codes)[2], 0x39);
  }
  for (const auto *codes : {&twice.row, &twice.column}) {
    EXPECT_EQ((*codes)[1], 0x38);
    EXPECT_EQ((*codes)[2], 0x3a);
  }
}

// Every scale with every code.
void check_dequantize(Mxfp8Form form, fsdp_dtype to_dtype) {
  constexpr size_t rows = 256, columns = 256;
  std::vector<uint8_t> codes(rows * columns), scales(codes.size() / 32);
  const auto scale_index = [&](size_t r, size_t c) {
    return form == Mxfp8Form::row ? r * columns / 32 + c / 32 : r / 32 * columns + c;
  };
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; ++c) {
      // Each scale covers 32 codes, and occurs with 8 blocks of them.
      const size_t outer = form == Mxfp8Form::row ? r : c, inner = form == Mxfp8Form::row ? c : r;
      codes[r * columns + c] = static_cast<uint8_t>(inner);
      scales[scale_index(r, c)] = static_cast<uint8_t>(outer);
    }
  Elements to(to_dtype, codes.size() + 1, 1);
  write(to.data(), to_dtype, codes.size(), 7);
  kernels::dequantize_mxfp8(to.data(), to_dtype, {codes.data(), scales.data(), rows, columns, form});
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; ++c) {
      const uint8_t code = codes[r * columns + c], scale = scales[scale_index(r, c)];
      const bool nan = (code & 0x7f) == 0x7f || scale == 255;
      const auto value = nan ? std::nanf("") : static_cast<float>(std::ldexp(value_of(code, e4m3), scale - 127));
      ASSERT_TRUE(same(to[r * columns + c], round_to(value, to_dtype))) << int{code} << " by " << int{scale};
    }
  ASSERT_EQ(to[codes.size()], 7);
}

TEST(KernelMxfp8, DequantizesEveryCodeByEveryScale) {
  on_every_target([] {
    for (const Mxfp8Form form : {Mxfp8Form::row, Mxfp8Form::column})
      for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16}) check_dequantize(form, dtype);
  });
}

// Each tile has 4 scales of rows 0, 32, 64, 96, 1, 33 ... The COL form is the ROW form of the transpose.
std::vector<uint8_t> swizzled(const std::vector<uint8_t> &scales, size_t rows, size_t columns) {
  std::vector<uint8_t> to;
  for (size_t tile = 0; tile < rows; tile += 128)
    for (size_t across = 0; across < columns; across += 4)
      for (size_t i = 0; i < 32; ++i)
        for (size_t r = tile + i; r < tile + 128; r += 32)
          for (size_t c = across; c < across + 4; ++c)
            to.push_back(r < rows && c < columns ? scales[r * columns + c] : 0);
  return to;
}

TEST(KernelMxfp8, SwizzledScalesLieWhereTheFormulaSays) {
  std::mt19937 random(1);
  for (const size_t rows : {1, 32, 128, 160, 300})
    for (const size_t columns : {1, 3, 4, 9, 128}) {
      std::vector<uint8_t> scales(rows * columns), transposed(scales.size());
      for (size_t i = 0; i < scales.size(); ++i) {
        scales[i] = static_cast<uint8_t>(1 + random() % 255);
        transposed[i % columns * rows + i / columns] = scales[i];
      }
      const std::vector<uint8_t> expected = swizzled(scales, rows, columns);
      std::vector<uint8_t> to(expected.size() + 1, 0xa5);
      const Mxfp8Swizzle work{scales.data(), rows, columns, Mxfp8Form::row, to.data()};
      const Mxfp8Swizzle other{transposed.data(), columns, rows, Mxfp8Form::column, to.data()};
      ASSERT_EQ(work.bytes(), expected.size());
      ASSERT_EQ(work.bytes(), (rows + 127) / 128 * 128 * ((columns + 3) / 4 * 4));
      for (const Mxfp8Swizzle &form : {work, other}) {
        std::fill(to.begin(), to.end(), 0xa5);
        kernels::swizzle_scales(form);
        ASSERT_EQ(to.back(), 0xa5);
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), to.begin())) << rows << " x " << columns;
      }
    }
}

#if defined(FSDP_HAS_FLOAT_MODES)
TEST(KernelMxfp8, DoesNotDependOnTheCallersModes) {
  for (const int top : {-149, -127, -3, 120}) {
    const std::vector<float> x = wide_values(32, 96, 13, top, top + 7);
    for (const ScaleRule rule : rules) {
      const Mxfp8Planes expected = quantized(x, 32, 96, rule);
      on_every_target([&] {
        std::vector<Mxfp8Planes> planes;
        std::vector<std::vector<float>> back;
        with_odd_modes([&] {
          planes.push_back(Quantized(x, 32, 96, rule).planes());
          back.emplace_back(x.size());
          kernels::dequantize_mxfp8(back.back().data(), FSDP_FLOAT32,
                                    {expected.column.data(), expected.column_scales.data(), 32, 96, Mxfp8Form::column});
        });
        for (const Mxfp8Planes &one : planes) EXPECT_EQ(one, expected) << top;
        for (size_t i = 0; i < x.size(); ++i) {
          const double value = std::ldexp(value_of(expected.column[i], e4m3), expected.column_scales[i % 96] - 127);
          for (const auto &one : back) ASSERT_EQ(one[i], value) << top;
        }
      });
    }
  }
}
#endif

}  // namespace
}  // namespace fsdp::test
