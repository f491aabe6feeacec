// SPDX-License-Identifier: Apache-2.0
// Compares the CUDA kernels of 8-bit numbers and their scales with the host's. The bits are the same for any input and
// alignment.
#include <memory>
#include <numeric>

#include "cuda_memory.h"
#include "float8_reference.h"

namespace fsdp::test {
namespace {

using namespace device;
namespace cuda = device::cuda::kernels;

std::vector<uint8_t> bytes(OnGpu &gpu) {
  const std::vector<std::byte> read = gpu.read();
  const auto *const first = reinterpret_cast<const uint8_t *>(read.data());
  return {first, first + read.size()};
}
uint8_t *codes_in(OnGpu &gpu) { return reinterpret_cast<uint8_t *>(gpu.data()); }

// Makes awkward numbers, and the neighbours of every tie of both formats.
std::vector<float> awkward(size_t count, uint32_t seed) {
  std::vector<float> x;
  for (const Float8Format &f : {e4m3, e5m2}) {
    const std::vector<double> &values = finite_values(f);
    for (size_t i = 0; i + 1 < values.size(); ++i) {
      const auto tie = static_cast<float>((values[i] + values[i + 1]) / 2);
      for (const float value : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, HUGE_VALF)})
        x.insert(x.end(), {value, -value});
    }
  }
  std::mt19937 random(seed);
  while (x.size() < count) x.push_back(random_value(random, Values::awkward));
  std::shuffle(x.begin(), x.end(), random);
  x.resize(count);
  return x;
}

void check_narrow(Float8 format, fsdp_dtype dtype, const void *from, size_t count, size_t offset, size_t to_offset) {
  std::vector<uint8_t> expected(count);
  kernels::cast_to_float8(expected.data(), format, from, dtype, count);
  OnGpu source(from, count * dtype_size(dtype), offset * dtype_size(dtype)), to(count, to_offset);
  ASSERT_LAUNCHED(cuda::cast_to_float8(gpu::stream(), codes_in(to), format, source.data(), dtype, count));
  ASSERT_EQ(bytes(to), expected) << count << " of " << dtype_name(dtype) << " at " << offset << " to " << to_offset;
}

TEST(CudaFloat8, EveryPatternHasTheHostsCode) {
  std::vector<uint16_t> patterns(65536);
  std::iota(patterns.begin(), patterns.end(), uint16_t{0});
  const std::vector<float> x = awkward(300000, 1);
  for (const Float8 format : {Float8::e4m3, Float8::e5m2}) {
    check_narrow(format, FSDP_FLOAT32, x.data(), x.size(), 0, 0);
    for (const fsdp_dtype dtype : {FSDP_BFLOAT16, FSDP_FLOAT16})
      check_narrow(format, dtype, patterns.data(), patterns.size(), 0, 0);
  }
}

TEST(CudaFloat8, AnyCountAndAlignmentHasTheHostsBits) {
  const std::vector<float> x = awkward(5000, 2);
  for (const Float8 format : {Float8::e4m3, Float8::e5m2})
    for (const fsdp_dtype dtype : dtypes)
      for (const size_t count : {0, 1, 3, 5, 127, 4097})
        for (size_t offsets = 0; offsets < 16; ++offsets)
          check_narrow(format, dtype, x.data(), count, offsets % 4, offsets / 4);
}

TEST(CudaFloat8, WidenedCodesHaveTheHostsValue) {
  std::vector<uint8_t> codes(256 + 3);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  for (const Float8 format : {Float8::e4m3, Float8::e5m2})
    for (const fsdp_dtype dtype : dtypes)
      for (const size_t offset : {0, 1, 3}) {
        std::vector<std::byte> expected(codes.size() * dtype_size(dtype));
        kernels::cast_from_float8(expected.data(), dtype, codes.data(), format, codes.size());
        OnGpu source(codes.data(), codes.size(), offset), to(expected.size(), offset * dtype_size(dtype));
        ASSERT_LAUNCHED(
            cuda::cast_from_float8(gpu::stream(), to.data(), dtype, codes_in(source), format, codes.size()));
        ASSERT_EQ(to.read(), expected) << dtype_name(dtype) << " at " << offset;
      }
}

// Makes tiles of any magnitude. With `spoilt`, some contain Inf and NaN.
std::vector<float> tiles(size_t rows, size_t columns, uint32_t seed, bool spoilt) {
  std::mt19937 random(seed);
  std::vector<float> x(rows * columns);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t tile = i / columns / 32 * ((columns + 31) / 32) + i % columns / 32;
    const int top = static_cast<int>(tile * 37 % 277) - 149;
    x[i] = static_cast<float>(std::ldexp(static_cast<double>(random()) - 0x1p31, top - 31 - int(random() % 12)));
    if (spoilt && random() % 300 == 0) x[i] = random_value(random, Values::awkward);
  }
  return x;
}

void check_mxfp8(const std::vector<float> &x, size_t rows, size_t columns, ScaleRule rule, bool via_bf16,
                 size_t offset) {
  SCOPED_TRACE(::testing::Message() << rows << " x " << columns << " at " << offset << ", via bf16 " << via_bf16);
  const size_t count = x.size();
  std::vector<uint8_t> row(count), row_scales(count / 32), column(count), column_scales(count / 32);
  kernels::quantize_mxfp8(
      {x.data(), rows, columns, rule, via_bf16, row.data(), row_scales.data(), column.data(), column_scales.data()});
  OnGpu from(x.data(), count * 4, offset * 4);
  OnGpu planes[4] = {OnGpu(count, offset), OnGpu(count / 32, offset), OnGpu(count, offset), OnGpu(count / 32, offset)};
  ASSERT_LAUNCHED(
      cuda::quantize_mxfp8(gpu::stream(), {from.floats(), rows, columns, rule, via_bf16, codes_in(planes[0]),
                                           codes_in(planes[1]), codes_in(planes[2]), codes_in(planes[3])}));
  ASSERT_EQ(bytes(planes[0]), row);
  ASSERT_EQ(bytes(planes[1]), row_scales);
  ASSERT_EQ(bytes(planes[2]), column);
  ASSERT_EQ(bytes(planes[3]), column_scales);
}

TEST(CudaMxfp8, CodesAndScalesAreTheHosts) {
  for (const ScaleRule rule : {ScaleRule::round_up, ScaleRule::floor})
    for (const bool via_bf16 : {false, true})
      for (const bool spoilt : {false, true})
        for (const size_t columns : {32, 96, 128, 160, 288})
          for (const size_t offset : {0, 1})
            check_mxfp8(tiles(96, columns, 3, spoilt), 96, columns, rule, via_bf16, offset);
}

// Expects the same bits, or two NaNs.
void expect_numbers(OnGpu &gpu, fsdp_dtype dtype, const std::byte *expected, size_t count) {
  const std::vector<std::byte> actual = gpu.read();
  for (size_t i = 0; i < count; ++i) ASSERT_TRUE(same(read(actual.data(), dtype, i), read(expected, dtype, i))) << i;
}

struct Codes {
  size_t rows, columns;
  std::vector<uint8_t> codes, scales;
  std::vector<float> scale_inv;
};

Codes random_codes(size_t rows, size_t columns) {
  std::mt19937 random(5);
  Codes made{
      rows, columns, std::vector<uint8_t>(rows * columns), std::vector<uint8_t>(rows * columns / 32 + columns), {}};
  for (uint8_t &code : made.codes) code = static_cast<uint8_t>(random());
  for (uint8_t &scale : made.scales) scale = static_cast<uint8_t>(random());
  for (size_t i = 0; i < made.codes.size(); ++i) made.scale_inv.push_back(random_value(random, Values::awkward));
  return made;
}

template <class OnHost, class OnDevice>
void check_dequantize(const Codes &made, fsdp_dtype dtype, const void *scales, size_t scale_bytes,
                      const OnHost &on_host, const OnDevice &on_device) {
  for (const size_t offset : {0, 1, 2}) {
    const size_t count = made.codes.size();
    std::vector<std::byte> expected(count * dtype_size(dtype));
    on_host(expected.data(), made.codes.data(), scales);
    OnGpu codes(made.codes.data(), count, offset), factors(scales, scale_bytes);
    OnGpu to(expected.size(), offset * dtype_size(dtype));
    ASSERT_LAUNCHED(on_device(to.data(), codes_in(codes), static_cast<const void *>(factors.data())));
    expect_numbers(to, dtype, expected.data(), count);
  }
}

TEST(CudaMxfp8, ValuesAreTheHosts) {
  const Codes made = random_codes(64, 160);
  for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16})
    for (const Mxfp8Form form : {Mxfp8Form::row, Mxfp8Form::column}) {
      const auto work = [&](const uint8_t *codes, const void *scales) {
        return Mxfp8Dequantize{codes, static_cast<const uint8_t *>(scales), made.rows, made.columns, form};
      };
      check_dequantize(
          made, dtype, made.scales.data(), made.scales.size(),
          [&](void *to, const uint8_t *c, const void *s) { kernels::dequantize_mxfp8(to, dtype, work(c, s)); },
          [&](void *to, const uint8_t *c, const void *s) {
            return cuda::dequantize_mxfp8(gpu::stream(), to, dtype, work(c, s));
          });
    }
}

TEST(CudaFp8, ValuesAreTheHosts) {
  const Codes made = random_codes(130, 300);
  for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16}) {
    check_dequantize(
        made, dtype, made.scale_inv.data(), 6 * 4,
        [&](void *to, const uint8_t *c, const void *s) {
          kernels::dequantize_fp8_blocks(to, dtype, {c, static_cast<const float *>(s), made.rows, made.columns});
        },
        [&](void *to, const uint8_t *c, const void *s) {
          return cuda::dequantize_fp8_blocks(gpu::stream(), to, dtype,
                                             {c, static_cast<const float *>(s), made.rows, made.columns});
        });
    const float scale = 0.3f;
    check_dequantize(
        made, dtype, &scale, 4,
        [&](void *to, const uint8_t *c, const void *s) {
          kernels::dequantize_fp8(to, dtype, {c, made.codes.size(), static_cast<const float *>(s)});
        },
        [&](void *to, const uint8_t *c, const void *s) {
          return cuda::dequantize_fp8(gpu::stream(), to, dtype, {c, made.codes.size(), static_cast<const float *>(s)});
        });
  }
}

// Makes matrices of several sizes for one launch, with Inf and NaN in every third. Some cannot be loaded in packs.
struct Matrices {
  std::vector<std::vector<float>> numbers;
  std::vector<std::unique_ptr<OnGpu>> from, codes, scales;
  std::vector<size_t> rows, columns;

  Matrices(size_t count, size_t side) {
    for (size_t i = 0; i < count; ++i) {
      rows.push_back(side * (1 + i % 3)), columns.push_back(side * (1 + i % 5));
      std::vector<float> x = tiles(rows[i], columns[i], static_cast<uint32_t>(i), false);
      for (size_t k = 0; i % 3 == 0 && k < x.size(); k += 37 + 13 * i) x[k] = k % 2 ? -std::nanf("") : -HUGE_VALF;
      from.push_back(std::make_unique<OnGpu>(x.data(), x.size() * 4, i % 4 == 1 ? 4 : 0));
      for (size_t plane = 0; plane < 2; ++plane) {
        codes.push_back(std::make_unique<OnGpu>(x.size(), i % 4 == 2));
        scales.push_back(std::make_unique<OnGpu>(x.size()));
      }
      numbers.push_back(std::move(x));
    }
  }
};

// Counts are added to the existing ones.
constexpr uint64_t before = 1000;

std::vector<uint64_t> counts_in(OnGpu &gpu) {
  std::vector<uint64_t> counts(gpu.read().size() / sizeof(uint64_t));
  std::memcpy(counts.data(), gpu.read().data(), counts.size() * sizeof(uint64_t));
  for (uint64_t &count : counts) count -= before;
  return counts;
}

TEST(CudaMxfp8, ManyMatricesAreQuantizedAndCountedAtOnce) {
  constexpr size_t count = 50;
  Matrices all(count, 32);
  const std::vector<uint64_t> zeros(count, before);
  OnGpu found(zeros.data(), count * 8);
  std::vector<Mxfp8Quantize> works;
  for (size_t i = 0; i < count; ++i)
    works.push_back({all.from[i]->floats(), all.rows[i], all.columns[i], i % 2 ? ScaleRule::floor : ScaleRule::round_up,
                     i % 5 == 0, codes_in(*all.codes[2 * i]), codes_in(*all.scales[2 * i]),
                     codes_in(*all.codes[2 * i + 1]), codes_in(*all.scales[2 * i + 1])});
  ASSERT_LAUNCHED(cuda::quantize_mxfp8(gpu::stream(), works, reinterpret_cast<uint64_t *>(found.data())));
  const std::vector<uint64_t> counts = counts_in(found);
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t size = all.numbers[i].size();
    std::vector<uint8_t> row(size), row_scales(size / 32), column(size), column_scales(size / 32);
    Mxfp8Quantize work = works[i];
    work.from = all.numbers[i].data(), work.row = row.data(), work.row_scales = row_scales.data();
    work.column = column.data(), work.column_scales = column_scales.data();
    kernels::quantize_mxfp8(work);
    ASSERT_EQ(bytes(*all.codes[2 * i]), row) << i;
    ASSERT_EQ(bytes(*all.codes[2 * i + 1]), column) << i;
    for (const auto &[scales, expected] : {std::pair(2 * i, &row_scales), {2 * i + 1, &column_scales}}) {
      std::vector<uint8_t> first = bytes(*all.scales[scales]);
      first.resize(size / 32);
      ASSERT_EQ(first, *expected) << i;
    }
    ASSERT_EQ(counts[i], kernels::count_nonfinite_scales(row_scales.data(), row_scales.size())) << i;
    sum += counts[i];
  }
  EXPECT_GT(sum, count);
}

TEST(CudaFp8, ManyMatricesAreQuantizedInBlocksAndCountedAtOnce) {
  constexpr size_t count = 50;
  Matrices all(count, 46);  // blocks begin at any number of a pack
  const std::vector<uint64_t> zeros(count, before);
  OnGpu found(zeros.data(), count * 8);
  std::vector<Fp8BlockQuantize> works;
  for (size_t i = 0; i < count; ++i)
    works.push_back({all.from[i]->floats(), all.rows[i], all.columns[i], i % 2 == 0, i % 5 == 0,
                     codes_in(*all.codes[2 * i]), all.scales[2 * i]->floats()});
  ASSERT_LAUNCHED(cuda::quantize_fp8_blocks(gpu::stream(), works, reinterpret_cast<uint64_t *>(found.data())));
  const std::vector<uint64_t> counts = counts_in(found);
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    std::vector<uint8_t> codes(all.numbers[i].size());
    std::vector<float> scales(fp8_blocks(all.rows[i]) * fp8_blocks(all.columns[i]));
    Fp8BlockQuantize work = works[i];
    work.from = all.numbers[i].data(), work.codes = codes.data(), work.scale_inv = scales.data();
    kernels::quantize_fp8_blocks(work);
    ASSERT_EQ(bytes(*all.codes[2 * i]), codes) << i;
    ASSERT_EQ(std::memcmp(all.scales[2 * i]->read().data(), scales.data(), scales.size() * 4), 0) << i;
    ASSERT_EQ(counts[i], kernels::count_nonfinite(all.numbers[i].data(), codes.size())) << i;
    sum += counts[i];
  }
  EXPECT_GT(sum, count);
}

TEST(CudaMxfp8, SwizzledScalesAreTheHosts) {
  std::mt19937 random(7);
  for (const Mxfp8Form form : {Mxfp8Form::row, Mxfp8Form::column})
    for (const size_t rows : {1, 5, 128, 200})
      for (const size_t columns : {1, 7, 128, 130}) {
        const uint64_t matrices = 1 + rows % 4;  // two of 1 and of 5 rows
        std::vector<uint8_t> scales(matrices * rows * columns);
        for (uint8_t &scale : scales) scale = static_cast<uint8_t>(random());
        Mxfp8Swizzle work{scales.data(), rows, columns, form, nullptr, matrices};
        std::vector<uint8_t> expected(work.bytes());
        work.to = expected.data();
        kernels::swizzle_scales(work);
        OnGpu from(scales.data(), scales.size(), 1), to(expected.size(), 1);
        work.scales = codes_in(from), work.to = codes_in(to);
        ASSERT_LAUNCHED(cuda::swizzle_scales(gpu::stream(), work));
        ASSERT_EQ(bytes(to), expected) << rows << " x " << columns;
      }
}

TEST(CudaFp8, AmaxesAndScales) {
  for (const bool via_bf16 : {false, true})
    for (const size_t count : {0, 1, 300, 5000, 700000})
      for (const bool spoilt : {false, true}) {
        std::vector<float> x = tiles(1, count, static_cast<uint32_t>(count), spoilt);
        if (count > 1) x[count - 1] = spoilt ? -std::nanf("") : -0x1.fffffep127f;
        OnGpu values(x.data(), count * 4, 4), result(4), scales(8);
        ASSERT_LAUNCHED(cuda::find_amax(gpu::stream(), result.floats(), values.floats(), count, via_bf16));
        const float expected = kernels::find_amax(x.data(), count, via_bf16);
        ASSERT_EQ(read(result.read().data(), FSDP_FLOAT32, 0), expected) << count;
        for (const bool power_of_two : {false, true}) {
          float both[2];
          kernels::find_fp8_scales({&expected, 1, 1, power_of_two, both, both + 1});
          ASSERT_LAUNCHED(cuda::find_fp8_scales(
              gpu::stream(), {result.floats(), 1, 1, power_of_two, scales.floats(), scales.floats() + 1}));
          ASSERT_EQ(std::memcmp(scales.read().data(), both, 8), 0) << expected;
        }
      }
}

TEST(CudaFp8, ScalesOfManyAmaxesOfRanks) {
  std::vector<float> amaxes = awkward(3000, 9);
  for (float &amax : amaxes) amax = std::isnan(amax) ? HUGE_VALF : std::fabs(amax);
  for (const uint32_t ranks : {1u, 3u}) {
    const uint64_t count = 3000 / ranks;
    std::vector<float> expected(6000);
    kernels::find_fp8_scales({amaxes.data(), ranks, count, false, expected.data(), &expected[count]});
    OnGpu from(amaxes.data(), 12000), to(24000);
    ASSERT_LAUNCHED(
        cuda::find_fp8_scales(gpu::stream(), {from.floats(), ranks, count, false, to.floats(), to.floats() + count}));
    EXPECT_EQ(std::memcmp(to.read().data(), expected.data(), 8 * count), 0) << ranks;
  }
}

TEST(CudaFp8, CodesAreTheHosts) {
  for (const float scale : {1.0f, 89.6f, 0x1p-20f, 1e10f, 0x1.fffffep127f})
    for (const size_t count : {0, 1, 127, 9001})
      for (size_t offsets = 0; offsets < 16; offsets += 5)
        for (const bool via_bf16 : {false, true}) {
          const std::vector<float> x = awkward(count, static_cast<uint32_t>(count));
          std::vector<uint8_t> expected(count);
          kernels::quantize_fp8({x.data(), count, via_bf16, &scale, expected.data()});
          OnGpu from(x.data(), count * 4, offsets / 4 * 4), on_gpu(&scale, 4), to(count, offsets % 4);
          ASSERT_LAUNCHED(
              cuda::quantize_fp8(gpu::stream(), {from.floats(), count, via_bf16, on_gpu.floats(), codes_in(to)}));
          ASSERT_EQ(bytes(to), expected) << count << " by " << scale;
        }
}

TEST(CudaFp8, ManyTensorsAreMeasuredAndQuantizedAtOnce) {
  constexpr size_t count = 100;
  std::vector<std::vector<float>> numbers;
  std::vector<std::unique_ptr<OnGpu>> from, codes;
  std::vector<float> scales;
  for (size_t i = 0; i < count; ++i) {
    numbers.push_back(awkward(i % 10 == 3 ? 0 : i % 7 * 1500 + i, static_cast<uint32_t>(i)));
    from.push_back(std::make_unique<OnGpu>(numbers[i].data(), numbers[i].size() * 4, i % 4 * 4));
    codes.push_back(std::make_unique<OnGpu>(numbers[i].size(), i % 4));
    scales.push_back(std::ldexp(1.7f, static_cast<int>(i) - 50));
  }
  const std::vector<float> stale(count, HUGE_VALF);
  OnGpu amaxes(stale.data(), count * 4), factors(scales.data(), count * 4);
  std::vector<AmaxSpan> spans;
  std::vector<Fp8Quantize> works;
  for (size_t i = 0; i < count; ++i) {
    spans.push_back({amaxes.floats() + i, from[i]->floats(), numbers[i].size(), i % 3 == 0});
    works.push_back({from[i]->floats(), numbers[i].size(), i % 3 == 0, factors.floats() + i, codes_in(*codes[i])});
  }
  ASSERT_LAUNCHED(cuda::find_amaxes(gpu::stream(), spans));
  ASSERT_LAUNCHED(cuda::quantize_fp8(gpu::stream(), works));
  for (size_t i = 0; i < count; ++i) {
    const float amax = read(amaxes.read().data(), FSDP_FLOAT32, i);
    ASSERT_EQ(amax, kernels::find_amax(numbers[i].data(), numbers[i].size(), i % 3 == 0)) << i;
    std::vector<uint8_t> expected(numbers[i].size());
    kernels::quantize_fp8({numbers[i].data(), expected.size(), i % 3 == 0, &scales[i], expected.data()});
    ASSERT_EQ(bytes(*codes[i]), expected) << i;
  }
}

TEST(CudaFp8, QuantizesBlocks) {
  for (const bool power_of_two : {false, true})
    for (const bool via_bf16 : {false, true})
      for (const auto &[rows, columns] : {std::pair<size_t, size_t>{128, 128}, {256, 300}, {131, 260}, {3, 5}}) {
        std::vector<float> x = tiles(rows, columns, 11, false);
        x[x.size() / 2] = rows == 131 ? std::nanf("") : x[x.size() / 2];
        std::vector<uint8_t> expected(x.size());
        std::vector<float> scale_inv(fp8_blocks(rows) * fp8_blocks(columns));
        kernels::quantize_fp8_blocks(
            {x.data(), rows, columns, power_of_two, via_bf16, expected.data(), scale_inv.data()});
        OnGpu from(x.data(), x.size() * 4, 4), codes(x.size(), 1), scales(scale_inv.size() * 4, 4);
        ASSERT_LAUNCHED(cuda::quantize_fp8_blocks(
            gpu::stream(), {from.floats(), rows, columns, power_of_two, via_bf16, codes_in(codes), scales.floats()}));
        ASSERT_EQ(bytes(codes), expected) << rows << " x " << columns;
        ASSERT_EQ(std::memcmp(scales.read().data(), scale_inv.data(), scale_inv.size() * 4), 0);
      }
}

}  // namespace
}  // namespace fsdp::test
