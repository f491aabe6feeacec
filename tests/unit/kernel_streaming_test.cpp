// SPDX-License-Identifier: Apache-2.0
// Tests quantizing where the kernels change their method: at the ends of pages that are read side by side, of vectors
// and of tiles, and for outputs so large that they bypass the caches. The codes must be those of the definitions. Large
// inputs repeat themselves, so that the definitions compute each number once. The period is not a multiple of the
// length of a page, vector or line.
#include <functional>

#include "float8_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

// Allocates bytes `offset` after the beginning of a line, between guard bytes that must not change.
class Codes {
 public:
  Codes(size_t count, size_t offset) : bytes_(count + 4 * line, mark), count_(count) {
    begin_ = line + (line - reinterpret_cast<uintptr_t>(bytes_.data()) % line) + offset;
  }
  uint8_t *data() { return bytes_.data() + begin_; }
  // Compares all codes with one period of expected codes; expected(i) gives row i of them.
  ::testing::AssertionResult are(const std::function<const uint8_t *(size_t row)> &expected, size_t columns) {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (i == begin_) i += count_;
      if (bytes_[i] != mark) return ::testing::AssertionFailure() << "byte " << i << " of the codes' surroundings";
    }
    for (size_t at = 0; at < count_; at += columns) {
      const size_t width = std::min(columns, count_ - at);
      if (std::memcmp(data() + at, expected(at / columns), width) != 0)
        return ::testing::AssertionFailure() << "codes " << at << " to " << at + width;
    }
    return ::testing::AssertionSuccess();
  }

 private:
  static constexpr uint8_t mark = 0xa5;
  static constexpr size_t line = 64;
  std::vector<uint8_t> bytes_;
  size_t count_, begin_;
};

// Neighbouring blocks have different magnitudes.
std::vector<float> numbers(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i)
    x[i] = std::ldexp(random_value(random, Values::ordinary), static_cast<int>(i / 32 % 7) - 3);
  return x;
}

// Makes `count` numbers by repeating the first ones.
std::vector<float> repeated(const std::vector<float> &period, size_t count) {
  std::vector<float> x(count);
  for (size_t at = 0; at < count; at += period.size())
    std::copy_n(period.begin(), std::min(period.size(), count - at), x.begin() + static_cast<std::ptrdiff_t>(at));
  return x;
}

// There are twice four pages of 1,024 numbers, two times 64 numbers, and five numbers. Each number is once the largest,
// and the numbers just outside are larger.
TEST(KernelStreaming, AmaxLooksAtEachNumberAndAtNoOther) {
  constexpr size_t count = 2 * 4096 + 2 * 64 + 5;
  std::vector<float> x(count + 2, 0.5f);
  x.front() = x.back() = 1e30f;
  on_every_target([&] {
    for (const bool via_bf16 : {false, true})
      for (size_t i = 1; i <= count; i += static_cast<size_t>(sampled(41))) {
        x[i] = -2;
        ASSERT_EQ(kernels::find_amax(x.data() + 1, count, via_bf16), 2) << i - 1;
        x[i] = 0.5f;
      }
  });
}

void check_fp8(size_t count, size_t offset, bool streamed) {
  SCOPED_TRACE(::testing::Message() << count << " at " << offset);
  constexpr size_t period = 8191;  // prime
  const float scale = 100;
  std::vector<float> some = numbers(period, 17);
  some[70] = HUGE_VALF, some[4096] = std::nanf(""), some[8000] = -std::nanf("");
  std::vector<uint8_t> codes(2 * period);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = code_for(some[i % period], scale);
  const std::vector<float> x = repeated(some, count);
  on_every_target([&] {
    Codes found(count, offset);
    const Fp8Quantize work{x.data(), count, false, &scale, found.data()};
    EXPECT_EQ(kernels::is_streamed(work), streamed);
    kernels::quantize_fp8(work);
    EXPECT_TRUE(found.are([&](size_t) { return codes.data(); }, period));
  });
}

TEST(KernelStreaming, Fp8AtTheEndsOfPages) {
  for (const size_t pages : {0, 1, 2})
    for (const size_t rest : {1, 63, 64, 65, 128, 1023, 1024, 4095})
      for (const size_t offset : {0, 1, 63}) check_fp8(pages * 4096 + rest, offset, false);
}

TEST(KernelStreaming, Fp8PastTheCaches) {
  if (sanitized) GTEST_SKIP() << "nothing that a sanitizer sees";
  constexpr size_t least = 8 << 20;
  check_fp8(least - 1, 0, false);
  for (const size_t offset : {0, 1, 63}) check_fp8(least, offset, true);
  check_fp8(least + 4096 + 69, 1, true);
}

struct BlocksCase {
  size_t rows, columns, offset;
  bool streamed;
};

// Rows repeat after 256, except those of the last blocks with fewer than 128 rows.
void check_large_blocks(const BlocksCase &c) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.columns << " at " << c.offset);
  constexpr size_t period = 256;
  const size_t rest = c.rows % 128, whole = c.rows - rest;
  const std::vector<float> some = numbers((period + rest) * c.columns, 19);
  const Fp8Blocks expected = fp8_blocks_of(some, period + rest, c.columns, false);
  std::vector<float> x;
  for (size_t r = 0; r < c.rows; ++r) {
    const auto from =
        some.begin() + static_cast<std::ptrdiff_t>((r < whole ? r % period : period + r - whole) * c.columns);
    x.insert(x.end(), from, from + static_cast<std::ptrdiff_t>(c.columns));
  }
  const size_t across = (c.columns + 127) / 128;
  on_every_target([&] {
    Codes codes(c.rows * c.columns, c.offset);
    std::vector<float> scales((c.rows + 127) / 128 * across + 1, 7);
    const Fp8BlockQuantize work{x.data(), c.rows, c.columns, false, false, codes.data(), scales.data()};
    EXPECT_EQ(kernels::is_streamed(work), c.streamed);
    kernels::quantize_fp8_blocks(work);
    EXPECT_TRUE(
        codes.are([&](size_t r) { return &expected.codes[(r < whole ? r % period : period + r - whole) * c.columns]; },
                  c.columns));
    for (size_t i = 0; i + 1 < scales.size(); ++i) {
      const size_t block = i / across < whole / 128 ? i / across % 2 : 2;
      ASSERT_EQ(scales[i], expected.scale_inv[block * across + i % across]) << "scale " << i;
    }
    EXPECT_EQ(scales.back(), 7);
  });
}

// The planes have 8 MiB, and rows are whole lines. Some rows end with half a block of 64 numbers.
TEST(KernelStreaming, Fp8BlocksPastTheCaches) {
  if (sanitized) GTEST_SKIP() << "nothing that a sanitizer sees";
  for (const BlocksCase &c :
       {BlocksCase{1920, 4096, 0, false}, BlocksCase{2047, 4096, 0, false}, BlocksCase{2048, 4096, 0, true},
        BlocksCase{2051, 4160, 0, true}, BlocksCase{2048, 4096, 32, false}, BlocksCase{2051, 4128, 0, false}})
    check_large_blocks(c);
}

struct PlanesCase {
  size_t rows, columns, row_offset, column_offset;
  bool streamed;
};

// A pattern of whole blocks is repeated, down and across.
void check_large_planes(const PlanesCase &c) {
  SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.columns << " at " << c.row_offset << ", "
                                    << c.column_offset);
  constexpr size_t down = 96, across = 160;
  const std::vector<float> some = numbers(down * across, 23);
  std::vector<float> wide(down * c.columns);
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = some[i / c.columns * across + i % c.columns % across];
  const Mxfp8Planes expected = quantized(wide, down, c.columns, ScaleRule::round_up);
  const std::vector<float> x = repeated(wide, c.rows * c.columns);
  on_every_target([&] {
    const size_t scales = x.size() / 32;
    Codes row(x.size(), c.row_offset), column(x.size(), c.column_offset), row_scales(scales, 3),
        column_scales(scales, 5);
    const Mxfp8Quantize work{
        x.data(),          c.rows,        c.columns,           ScaleRule::round_up, false, row.data(),
        row_scales.data(), column.data(), column_scales.data()};
    EXPECT_EQ(kernels::is_streamed(work), c.streamed);
    kernels::quantize_mxfp8(work);
    const auto rows_of = [&](const std::vector<uint8_t> &plane, size_t width, size_t period) {
      return [&plane, width, period](size_t r) { return &plane[r % period * width]; };
    };
    EXPECT_TRUE(row.are(rows_of(expected.row, c.columns, down), c.columns));
    EXPECT_TRUE(column.are(rows_of(expected.column, c.columns, down), c.columns));
    EXPECT_TRUE(row_scales.are(rows_of(expected.row_scales, c.columns / 32, down), c.columns / 32));
    EXPECT_TRUE(column_scales.are(rows_of(expected.column_scales, c.columns, down / 32), c.columns));
  });
}

// Both planes together have 8 MiB, and both have whole lines. Columns after the last 64 form a tile of half the width.
TEST(KernelStreaming, Mxfp8PastTheCaches) {
  if (sanitized) GTEST_SKIP() << "nothing that a sanitizer sees";
  for (const PlanesCase &c :
       {PlanesCase{992, 4096, 0, 0, false}, PlanesCase{1024, 4096, 0, 0, true}, PlanesCase{1024, 4160, 64, 0, true},
        PlanesCase{1024, 4128, 0, 0, false}, PlanesCase{1024, 4096, 32, 0, false}, PlanesCase{1024, 4096, 0, 1, false}})
    check_large_planes(c);
}

}  // namespace
}  // namespace fsdp::test
