// SPDX-License-Identifier: Apache-2.0
#include "kernel_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

struct SumCase {
  fsdp_dtype source, wire;
  uint32_t ranks;
  size_t count, offset;
  float factor;
  bool accumulate;
  Values values;
  uint64_t results_bytes = 0;
};

float expected_value(const SumCase &c, Elements &sources, size_t stride, float before, size_t i) {
  float total = round_to(sources[i], c.wire);
  for (uint32_t r = 1; r < c.ranks; ++r) total = total + round_to(sources[r * stride + i], c.wire);
  if (c.factor != 1.0f) total = total * c.factor;
  return c.accumulate ? before + total : total;
}

// `change` may change the sources, of which each rank has count + 5.
template <class Change>
void check(const SumCase &c, Change &&change) {
  const size_t stride = c.count + 5;  // not aligned to anything
  Elements sources(c.source, stride * c.ranks, c.offset), out(FSDP_FLOAT32, c.count + 1, c.offset);
  sources.fill(static_cast<uint32_t>(c.count + c.ranks), c.values);
  change(sources, stride);
  out.fill(99, Values::ordinary);
  std::vector<float> expected(c.count + 1, out[c.count]);
  for (size_t i = 0; i < c.count; ++i) expected[i] = expected_value(c, sources, stride, out[i], i);
  kernels::rank_sum({sources.data(), stride * dtype_size(c.source), c.ranks, c.source, c.wire, out.floats(), c.count,
                     c.factor, c.accumulate, false, c.results_bytes});
  for (size_t i = 0; i <= c.count; ++i)
    ASSERT_TRUE(same(out[i], expected[i]))
        << out[i] << " not " << expected[i] << " at " << i << " of " << c.count << ", " << c.ranks << " ranks, "
        << dtype_name(c.source) << " as " << dtype_name(c.wire) << ", offset " << c.offset;
}

void check(const SumCase &c) {
  check(c, [](Elements &, size_t) {});
}

TEST(KernelRankSum, AllDtypesRanksAndSizesMatchTheDefinition) {
  on_every_target([] {
    for (const fsdp_dtype source : dtypes)
      for (const fsdp_dtype wire : dtypes)
        for (const uint32_t ranks : {1, 2, 3, 4, 5, 8})
          for (size_t count = 0; count < 68; ++count)
            check({source, wire, ranks, count, count % 3, ranks % 2 ? 1.0f : 0.3f, count % 2 == 1, Values::awkward});
  });
}

TEST(KernelRankSum, FactorAndAccumulateMatchTheDefinition) {
  on_every_target([] {
    for (const float factor : {1.0f, 0.25f, 1.0f / 3})
      for (const bool accumulate : {false, true})
        for (const uint32_t ranks : {1, 2, 7})
          check({FSDP_BFLOAT16, FSDP_BFLOAT16, ranks, 1000, 1, factor, accumulate, Values::ordinary});
  });
}

TEST(KernelRankSum, OutputsThatBypassTheCacheHaveTheSameBits) {
  constexpr size_t count = kernels::streaming_bytes / sizeof(float) + 77;
  on_every_target([] {
    check({FSDP_FLOAT32, FSDP_FLOAT32, 2, count, 1, 0.5f, false, Values::ordinary});
    check({FSDP_BFLOAT16, FSDP_BFLOAT16, 3, count, 0, 1.0f, false, Values::ordinary});
    check({FSDP_FLOAT32, FSDP_BFLOAT16, 2, count, 15, 1.0f, false, Values::ordinary});
    check({FSDP_FLOAT32, FSDP_FLOAT32, 2, count, 3, 1.0f, true, Values::ordinary});
  });
}

// The results are shorter than a page of fp32, or near one, four and eight pages. One of the offsets is at a line.
TEST(KernelRankSum, ShortResultsOfManySumsHaveTheSameBits) {
  on_every_target([] {
    for (const size_t count : {10, 1023, 1024, 1039, 4096, 4096 + 79, 8192 + 64 + 63})
      for (const size_t offset : {0, 4, 8, 12, 15})
        for (const auto &[dtype, wire] : {std::pair{FSDP_FLOAT32, FSDP_FLOAT32},
                                          {FSDP_BFLOAT16, FSDP_BFLOAT16},
                                          {FSDP_FLOAT32, FSDP_BFLOAT16},
                                          {FSDP_FLOAT32, FSDP_FLOAT16}})
          for (const uint32_t ranks : {1, 2, 3})
            for (const bool accumulate : {false, true})
              check({dtype, wire, ranks, count, offset, 0.3f, accumulate, Values::awkward, kernels::late_bytes});
  });
}

// Without a test for NaN, rounding would turn these NaN into Inf, 0 and -0.
TEST(KernelRankSum, ASingleNaNStaysNaN) {
  on_every_target([] {
    for (const uint32_t bits : {0x7f800001u, 0xffffffffu, 0x7fffffffu})
      for (const uint32_t ranks : {1u, 2u, 3u})
        for (const uint32_t rank : {0u, ranks - 1})
          for (size_t place = 0; place < 67; ++place)
            check({FSDP_FLOAT32, FSDP_BFLOAT16, ranks, 67, 0, 0.5f, place % 2 == 1, Values::ordinary},
                  [&](Elements &sources, size_t stride) {
                    sources.floats()[rank * stride + place] = std::bit_cast<float>(bits);
                  });
  });
}

TEST(KernelRankSum, InfinitiesAreAddedOnlyToAddendsOfTheSameElement) {
  on_every_target([] {
    for (const uint32_t rank : {0u, 1u})
      for (size_t place = 0; place < 66; ++place)
        check({FSDP_FLOAT32, FSDP_BFLOAT16, 2, 67, 0, 1.0f, false, Values::ordinary},
              [&](Elements &sources, size_t stride) {
                sources.floats()[place] = HUGE_VALF;
                sources.floats()[rank * stride + 66 - place] = -HUGE_VALF;
              });
  });
}

TEST(KernelRankSum, OneRankIsACopyOfTheBits) {
  on_every_target([] {
    const uint32_t bits[] = {0x80000000u, 1u, 0x80000001u, 0x7f800000u, 0x7fc01234u, 0x3f800001u};
    float out[6] = {};
    kernels::rank_sum(
        {reinterpret_cast<const std::byte *>(bits), 0, 1, FSDP_FLOAT32, FSDP_FLOAT32, out, 6, 1.0f, false});
    EXPECT_EQ(std::memcmp(out, bits, sizeof bits), 0);
  });
}

// In rank order (2^24 + 1) + 1 loses both ones, while 1 + 1 + 2^24 keeps them.
TEST(KernelRankSum, AddsInRankOrder) {
  const float ascending[] = {1, 1, 0x1p24f}, descending[] = {0x1p24f, 1, 1};
  float out = 0;
  RankSum sum{reinterpret_cast<const std::byte *>(ascending), 4, 3, FSDP_FLOAT32, FSDP_FLOAT32, &out, 1, 1.0f, false};
  kernels::rank_sum(sum);
  EXPECT_EQ(out, 0x1p24f + 2);
  sum.base = reinterpret_cast<const std::byte *>(descending);
  kernels::rank_sum(sum);
  EXPECT_EQ(out, 0x1p24f);
}

// The larger sums are added page by page.
TEST(KernelRankSum, OutMayBeOneOfTheSources) {
  on_every_target([] {
    for (const size_t count : {size_t{1003}, kernels::streaming_bytes / sizeof(float) + 77})
      for (const uint32_t own : {0u, 1u}) {
        std::vector<float> values(2 * count);
        for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.1f;
        const std::vector<float> before = values;
        kernels::rank_sum({reinterpret_cast<const std::byte *>(values.data()), count * sizeof(float), 2, FSDP_FLOAT32,
                           FSDP_FLOAT32, values.data() + own * count, count, 1.0f, false, true});
        for (size_t i = 0; i < count; ++i) ASSERT_EQ(values[own * count + i], before[i] + before[count + i]) << i;
      }
  });
}

#if defined(FSDP_HAS_FLOAT_MODES)
TEST(KernelRankSum, DoesNotDependOnTheCallersModes) {
  on_every_target([] {
    const float tiny[] = {0x1p-149f, 0x1p-149f, 1.0f, 0x1p-25f};
    float out[2];
    with_odd_modes([&] {
      kernels::rank_sum(
          {reinterpret_cast<const std::byte *>(tiny), 8, 2, FSDP_FLOAT32, FSDP_FLOAT32, out, 2, 1.0f, false});
    });
    EXPECT_EQ(out[0], 1.0f);
    EXPECT_EQ(out[1], 0x1p-149f + 0x1p-25f);
  });
}
#endif

}  // namespace
}  // namespace fsdp::test
