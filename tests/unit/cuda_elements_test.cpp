// SPDX-License-Identifier: Apache-2.0
// Compares the CUDA kernels that work element by element with the host's. The bits are the same for any input and
// alignment.
#include "cuda_memory.h"
#include "kernel_reference.h"

namespace fsdp::test {
namespace {

using namespace device;
namespace cuda = device::cuda::kernels;

size_t bytes_of(fsdp_dtype dtype, size_t count) { return dtype_size(dtype) * count; }

// Makes fp32 numbers around every number at which rounding to 16 bits changes its result, and numbers of random bits.
std::vector<uint32_t> fp32_patterns() {
  std::vector<uint32_t> patterns;
  for (uint32_t exponent = 0; exponent < 256; ++exponent)
    for (const uint32_t mantissa :
         {0x0u,      0x1u,      0xfffu,    0x1000u,   0x1001u,   0x1fffu,   0x2000u,   0x2fffu,  0x3000u,
          0x3001u,   0x7fffu,   0x8000u,   0x8001u,   0xffffu,   0x10000u,  0x17fffu,  0x18000u, 0x18001u,
          0x3fffffu, 0x400000u, 0x400001u, 0x7fefffu, 0x7ff000u, 0x7f7fffu, 0x7f8000u, 0x7fffffu})
      for (const uint32_t sign : {0u, 0x80000000u}) patterns.push_back(sign | exponent << 23 | mantissa);
  std::mt19937 random(7);
  for (int i = 0; i < 300000; ++i) patterns.push_back(static_cast<uint32_t>(random()));
  return patterns;
}

std::vector<std::byte> every_pattern(fsdp_dtype dtype) {
  std::vector<std::byte> bytes;
  if (dtype == FSDP_FLOAT32) {
    const auto patterns = fp32_patterns();
    bytes.resize(patterns.size() * 4);
    std::memcpy(bytes.data(), patterns.data(), bytes.size());
  } else {
    std::vector<uint16_t> patterns(65536);
    for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
    bytes.resize(patterns.size() * 2);
    std::memcpy(bytes.data(), patterns.data(), bytes.size());
  }
  return bytes;
}

void check_cast(fsdp_dtype to, size_t to_offset, fsdp_dtype from, size_t from_offset, const void *values,
                size_t count) {
  SCOPED_TRACE(::testing::Message() << count << " of " << from << " at " << from_offset << " to " << to << " at "
                                    << to_offset);
  std::vector<std::byte> expected(bytes_of(to, count));
  kernels::cast(expected.data(), to, values, from, count);
  OnGpu source(values, bytes_of(from, count), bytes_of(from, from_offset)),
      target(expected.size(), bytes_of(to, to_offset));
  ASSERT_LAUNCHED(cuda::cast(gpu::stream(), target.data(), to, source.data(), from, count));
  ASSERT_EQ(target.read(), expected);
}

TEST(CudaCast, EveryPatternToEveryType) {
  for (const fsdp_dtype from : dtypes) {
    const auto values = every_pattern(from);
    for (const fsdp_dtype to : dtypes) check_cast(to, 0, from, 0, values.data(), values.size() / dtype_size(from));
  }
}

TEST(CudaCast, AnyCountAndAlignmentHasTheHostsBits) {
  const auto wide = every_pattern(FSDP_FLOAT32);
  for (const fsdp_dtype from : dtypes)
    for (const fsdp_dtype to : dtypes)
      for (const size_t count : {0, 1, 2, 3, 4, 5, 7, 8, 127, 1023, 4097})
        for (size_t offsets = 0; offsets < 16; ++offsets)
          check_cast(to, offsets / 4, from, offsets % 4, wide.data(), count);
}

// Expects the same bits, or two NaNs.
void expect_same(fsdp_dtype dtype, const std::vector<std::byte> &actual, Elements &expected, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float a = read(actual.data(), dtype, i), e = expected[i];
    ASSERT_TRUE(same(a, e)) << "element " << i << ": " << a << ", expected " << e;
  }
}

void check_add(fsdp_dtype to, size_t to_offset, fsdp_dtype from, size_t from_offset, size_t count) {
  SCOPED_TRACE(::testing::Message() << count << " of " << from << " at " << from_offset << " to " << to << " at "
                                    << to_offset);
  Elements sum(to, count), addend(from, count);
  sum.fill(1, Values::awkward), addend.fill(2, Values::awkward);
  OnGpu gpu_sum(sum.data(), bytes_of(to, count), bytes_of(to, to_offset));
  OnGpu gpu_addend(addend.data(), bytes_of(from, count), bytes_of(from, from_offset));
  kernels::add(sum.data(), to, addend.data(), from, count);
  ASSERT_LAUNCHED(cuda::add(gpu::stream(), gpu_sum.data(), to, gpu_addend.data(), from, count));
  expect_same(to, gpu_sum.read(), sum, count);
}

TEST(CudaAdd, EveryPairOfDtypesHasTheHostsSum) {
  for (const fsdp_dtype from : dtypes)
    for (const fsdp_dtype to : dtypes) {
      for (const size_t count : {0, 1, 6, 127, 4099, 40000}) check_add(to, 0, from, 0, count);
      check_add(to, 3, from, 3, 5001);
      check_add(to, 1, from, 2, 5001);
    }
}

TEST(CudaScale, FactorsHaveTheHostsBits) {
  for (const float factor : {1.0f, 0.3f, -2.0f, 0x1p-140f, HUGE_VALF, std::nanf("")})
    for (const size_t count : {0, 1, 127, 9001})
      for (size_t offset = 0; offset < 4; ++offset) {
        Elements values(FSDP_FLOAT32, count);
        values.fill(3, Values::awkward);
        OnGpu actual(values.data(), count * 4, offset * 4);
        kernels::scale(values.floats(), factor, count);
        ASSERT_LAUNCHED(cuda::scale(gpu::stream(), actual.floats(), factor, count));
        expect_same(FSDP_FLOAT32, actual.read(), values, count);
      }
}

struct SumCase {
  uint32_t ranks;
  fsdp_dtype source, wire;
  size_t count, stride, offset;  // in elements; stride >= count
  float factor;
  bool accumulate;
};

void check_sum(const SumCase &c) {
  SCOPED_TRACE(::testing::Message() << c.ranks << " ranks of " << c.source << " as " << c.wire << ", " << c.count
                                    << " at stride " << c.stride << " and offset " << c.offset << ", accumulate "
                                    << c.accumulate);
  Elements sources(c.source, c.ranks * c.stride), out(FSDP_FLOAT32, c.count);
  sources.fill(c.ranks, Values::awkward), out.fill(5, Values::awkward);
  OnGpu gpu_sources(sources.data(), bytes_of(c.source, c.ranks * c.stride), bytes_of(c.source, c.offset));
  OnGpu gpu_out(out.data(), c.count * 4, c.offset * 4);
  RankSum sum{sources.data(), bytes_of(c.source, c.stride), c.ranks, c.source, c.wire, out.floats(), c.count, c.factor,
              c.accumulate};
  kernels::rank_sum(sum);
  sum.base = gpu_sources.data();
  sum.out = gpu_out.floats();
  ASSERT_LAUNCHED(cuda::rank_sum(gpu::stream(), sum));
  expect_same(FSDP_FLOAT32, gpu_out.read(), out, c.count);
}

TEST(CudaRankSum, AnyRanksAndTypesHaveTheHostsBits) {
  for (uint32_t ranks = 1; ranks <= 8; ++ranks)
    for (const fsdp_dtype source : dtypes)
      for (const fsdp_dtype wire : dtypes) {
        check_sum({ranks, source, wire, 1500, 1536, 0, 1.0f / static_cast<float>(ranks), false});
        check_sum({ranks, source, wire, 1500, 1536, 0, 1.0f, true});
      }
}

TEST(CudaRankSum, AnyCountAndAlignmentHasTheHostsBits) {
  for (const fsdp_dtype source : {FSDP_FLOAT32, FSDP_BFLOAT16})
    for (const size_t count : {0, 1, 127, 4100, 20001})
      for (const size_t odd : {0, 1})
        for (const size_t offset : {0, 1, 3})
          check_sum({3, source, FSDP_FLOAT32, count, (count + 3) / 4 * 4 + odd, offset, 0.25f, true});
  check_sum({17, FSDP_BFLOAT16, FSDP_FLOAT32, 1000, 1024, 0, 1.0f / 17, false});
}

TEST(CudaRankSum, OutIsASliceOfASource) {
  constexpr size_t count = 3000;
  for (uint32_t own = 0; own < 3; ++own) {
    Elements sources(FSDP_FLOAT32, 3 * count);
    sources.fill(9, Values::awkward);
    OnGpu actual(sources.data(), 3 * count * 4);
    RankSum sum{sources.data(), count * 4, 3,     FSDP_FLOAT32, FSDP_BFLOAT16, sources.floats() + own * count,
                count,          0.5f,      false, true};
    kernels::rank_sum(sum);
    sum.base = actual.data();
    sum.out = actual.floats() + own * count;
    ASSERT_LAUNCHED(cuda::rank_sum(gpu::stream(), sum));
    expect_same(FSDP_FLOAT32, actual.read(), sources, 3 * count);
  }
}

TEST(CudaRankSum, NoRanksIsNothing) {
  OnGpu out(64);
  RankSum sum{nullptr, 0, 0, FSDP_FLOAT32, FSDP_FLOAT32, out.floats(), 16, 1, false};
  ASSERT_LAUNCHED(cuda::rank_sum(gpu::stream(), sum));
  EXPECT_EQ(out.read(), std::vector<std::byte>(64, std::byte{0xa5}));
}

}  // namespace
}  // namespace fsdp::test
