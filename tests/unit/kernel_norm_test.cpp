// SPDX-License-Identifier: Apache-2.0
#include "kernel_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

struct LaneSums {
  double lane[16] = {};
  double fold() {
    for (size_t half = 8; half > 0; half /= 2)
      for (size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
    return lane[0];
  }
};

// Follows the definition at norm_piece in device/work.h.
double reference(const float *values, size_t count, size_t granule) {
  LaneSums pieces;
  size_t piece = 0;
  for (size_t begin = 0; begin < count; begin += granule) {
    const size_t granule_end = std::min(begin + granule, count);
    for (size_t first = begin; first < granule_end; first += 4096) {
      LaneSums elements;
      for (size_t i = first; i < std::min(first + 4096, granule_end); ++i) {
        const double x = static_cast<double>(values[i]);
        elements.lane[(i - first) % 16] += x * x;
      }
      pieces.lane[piece++ % 16] += elements.fold();
    }
  }
  return pieces.fold();
}

TEST(KernelSumSquares, SameBitsAsTheDefinition) {
  on_every_target([] {
    for (size_t count = 0; count < 68; ++count)
      for (const size_t granule : {1, 2, 3, 7, 8, 15, 16, 17, 64, 100}) {
        Elements values(FSDP_FLOAT32, count, count % 3);
        values.fill(static_cast<uint32_t>(count), Values::ordinary);
        const double sum = kernels::sum_squares(values.floats(), count, granule);
        ASSERT_EQ(std::bit_cast<uint64_t>(sum), std::bit_cast<uint64_t>(reference(values.floats(), count, granule)))
            << count << " by " << granule;
      }
  });
}

TEST(KernelSumSquares, LargeAndWholeGranule) {
  constexpr size_t count = 1000003;
  Elements values(FSDP_FLOAT32, count, 1);
  values.fill(3, Values::ordinary);
  long double exact = 0;
  for (size_t i = 0; i < count; ++i) exact += static_cast<long double>(values[i]) * static_cast<long double>(values[i]);
  on_every_target([&] {
    EXPECT_EQ(kernels::sum_squares(values.floats(), count, 768), reference(values.floats(), count, 768));
    EXPECT_EQ(kernels::sum_squares(values.floats(), count, 10000), reference(values.floats(), count, 10000));
    EXPECT_EQ(kernels::sum_squares(values.floats(), count, 0), reference(values.floats(), count, count));
    EXPECT_NEAR(kernels::sum_squares(values.floats(), count, 768) / static_cast<double>(exact), 1.0, 1e-14);
  });
}

TEST(KernelSumSquares, SubnormalsLargestAndNan) {
  const float tiny = 0x1p-149f, large = 0x1.fffffep127f;
  EXPECT_EQ(kernels::sum_squares(&tiny, 1, 1), 0x1p-298);
  EXPECT_EQ(kernels::sum_squares(&large, 1, 4), static_cast<double>(large) * static_cast<double>(large));
  const float nan[3] = {1, std::nanf(""), 2};
  EXPECT_TRUE(std::isnan(kernels::sum_squares(nan, 3, 3)));
}

struct CompactNumbers {
  std::vector<uint16_t> values;
  std::vector<int16_t> rests;
  std::vector<float> exact;  // the same numbers in fp32

  CompactSquaresSpan span(fsdp_dtype dtype, uint64_t granule) const {
    return {nullptr, values.data(), rests.empty() ? nullptr : rests.data(), dtype, values.size(), granule};
  }
};

// `dtype` 0 stands for fp32 numbers in two halves.
CompactNumbers make_compact(size_t count, fsdp_dtype dtype) {
  Elements elements(FSDP_FLOAT32, count);
  elements.fill(static_cast<uint32_t>(count), Values::ordinary);
  CompactNumbers numbers;
  numbers.exact.assign(elements.floats(), elements.floats() + count);
  numbers.values.resize(count);
  if (dtype) {
    kernels::cast(numbers.values.data(), dtype, elements.floats(), FSDP_FLOAT32, count);
    kernels::cast(numbers.exact.data(), FSDP_FLOAT32, numbers.values.data(), dtype, count);
    return numbers;
  }
  for (size_t i = 0; i < count; ++i) {
    const SplitWeight split = split_weight(std::bit_cast<uint32_t>(numbers.exact[i]));
    numbers.values[i] = split.upper;
    numbers.rests.push_back(split.rest);
  }
  return numbers;
}

TEST(KernelSumSquares, NumbersIn16BitsOrTwoHalvesGiveTheBitsOfFp32) {
  on_every_target([] {
    for (const fsdp_dtype dtype : {FSDP_BFLOAT16 + 0, FSDP_FLOAT16 + 0, 0})
      for (const size_t count : {0, 1, 15, 16, 17, 4096, 4097, 20000}) {
        const CompactNumbers numbers = make_compact(count, dtype);
        for (const size_t granule : {0, 1, 3, 16, 100, 4096, 10000}) {
          const double sum = kernels::sum_compact_squares(numbers.span(dtype ? dtype : FSDP_BFLOAT16 + 0, granule));
          ASSERT_EQ(std::bit_cast<uint64_t>(sum),
                    std::bit_cast<uint64_t>(reference(numbers.exact.data(), count, granule ? granule : count)))
              << dtype << ": " << count << " by " << granule;
        }
      }
  });
}

#if defined(FSDP_HAS_FLOAT_MODES)
TEST(KernelSumSquares, DoesNotDependOnTheCallersModes) {
  on_every_target([] {
    const float values[] = {0x1p-149f, 1, 0x1p-30f};
    double sum = 0;
    with_odd_modes([&] {
      sum = kernels::sum_squares(values, 3, 1);
      EXPECT_EQ(sum, 1.0);
      sum = kernels::sum_squares(values, 1, 2);
      EXPECT_EQ(sum, 0x1p-298);
    });
  });
}
#endif

TEST(KernelCountNonfinite, AnySizeIsCounted) {
  on_every_target([] {
    for (const size_t count : {0, 1, 2, 3, 15, 16, 17, 63, 67, 100003, 1 << 22}) {
      Elements values(FSDP_FLOAT32, count, 1);
      values.fill(4, count > 100003 ? Values::ordinary : Values::awkward);
      if (count > 100003) std::fill_n(values.floats(), count, HUGE_VALF);
      uint64_t expected = 0;
      for (size_t i = 0; i < count; ++i) expected += !std::isfinite(values[i]);
      ASSERT_EQ(kernels::count_nonfinite(values.floats(), count), expected) << count;
    }
  });
}

TEST(KernelCountZeros, BothZerosCountAndNothingElse) {
  on_every_target([] {
    for (const size_t count : {0, 1, 2, 3, 15, 16, 17, 63, 67, 100003, 1 << 22}) {
      Elements values(FSDP_FLOAT32, count, 1);
      values.fill(5, count > 100003 ? Values::ordinary : Values::awkward);
      if (count > 100003) std::fill_n(values.floats(), count, -0.0f);
      for (size_t i = 0; i < count; i += 5) values.floats()[i] = i % 2 ? 0.0f : 0x1p-149f;
      uint64_t expected = 0;
      for (size_t i = 0; i < count; ++i) expected += values[i] == 0;
      ASSERT_EQ(kernels::count_zeros(values.floats(), count), expected) << count;
    }
  });
}

}  // namespace
}  // namespace fsdp::test
