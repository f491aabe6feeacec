// SPDX-License-Identifier: Apache-2.0
// Compares the CUDA kernels for AdamW, norms and counts with the host's. The bits are the same.
#include <memory>

#include "adamw_reference.h"
#include "cuda_memory.h"

namespace fsdp::test {
namespace {

using namespace device;
namespace cuda = device::cuda::kernels;

AdamW make_step(int number) { return test::make_step(number, number % 2 ? 0.1f : 0.0f); }

enum class Copied { none, itself, fp32, bf16, fp16 };
constexpr Copied all_copied[] = {Copied::none, Copied::itself, Copied::fp32, Copied::bf16, Copied::fp16};

// Holds one span's arrays on the host and on the GPU.
struct Arrays {
  size_t count;
  Copied copied;
  fsdp_dtype dtype;
  Elements weight, grad, exp_avg, exp_avg_sq, compute;
  OnGpu gpu_weight, gpu_grad, gpu_exp_avg, gpu_exp_avg_sq, gpu_compute;

  // Offsets in elements, of most arrays and of the gradient.
  Arrays(size_t count, Copied copied, size_t offset, size_t grad_offset, Values values)
      : count(count),
        copied(copied),
        dtype(copied == Copied::bf16   ? FSDP_BFLOAT16
              : copied == Copied::fp16 ? FSDP_FLOAT16
                                       : FSDP_FLOAT32),
        weight(Elements(FSDP_FLOAT32, count).fill(1, values)),
        grad(Elements(FSDP_FLOAT32, count).fill(2, values)),
        exp_avg(FSDP_FLOAT32, count),
        exp_avg_sq(FSDP_FLOAT32, count),
        compute(dtype, count),
        gpu_weight(weight.data(), count * 4, offset * 4),
        gpu_grad(grad.data(), count * 4, grad_offset * 4),
        gpu_exp_avg(exp_avg.data(), count * 4, offset * 4),
        gpu_exp_avg_sq(exp_avg_sq.data(), count * 4, offset * 4),
        gpu_compute(compute.data(), count * dtype_size(dtype), offset * dtype_size(dtype)) {}

  template <class Array>
  void *to(Array &weights, Array &computes) {
    return copied == Copied::none ? nullptr : copied == Copied::itself ? weights.data() : computes.data();
  }
  AdamWSpan host_span() {
    return {weight.floats(), grad.floats(), exp_avg.floats(), exp_avg_sq.floats(), to(weight, compute), dtype, count};
  }
  AdamWSpan gpu_span() {
    return {gpu_weight.floats(),
            gpu_grad.floats(),
            gpu_exp_avg.floats(),
            gpu_exp_avg_sq.floats(),
            to(gpu_weight, gpu_compute),
            dtype,
            count};
  }
  static void expect_same(fsdp_dtype dtype, OnGpu &actual, Elements &expected, size_t count, const char *what) {
    const auto values = actual.read();
    for (size_t i = 0; i < count; ++i) {
      const float a = test::read(values.data(), dtype, i), e = expected[i];
      ASSERT_TRUE(same(a, e)) << what << " " << i << " of " << count << ": " << a << ", expected " << e;
    }
  }
  void check() {
    expect_same(FSDP_FLOAT32, gpu_weight, weight, count, "weight");
    expect_same(FSDP_FLOAT32, gpu_exp_avg, exp_avg, count, "exp_avg");
    expect_same(FSDP_FLOAT32, gpu_exp_avg_sq, exp_avg_sq, count, "exp_avg_sq");
    expect_same(dtype, gpu_compute, compute, count, "compute");
  }
};

// Makes some steps over all arrays in one call, on the host and on the GPU.
void check(std::vector<std::unique_ptr<Arrays>> &arrays, int steps) {
  std::vector<AdamWSpan> host, gpu;
  for (auto &a : arrays) host.push_back(a->host_span()), gpu.push_back(a->gpu_span());
  for (int number = 1; number <= steps; ++number) {
    kernels::adamw(make_step(number), host);
    ASSERT_LAUNCHED(cuda::adamw(gpu::stream(), make_step(number), gpu));
  }
  for (auto &a : arrays) a->check();
}

TEST(CudaAdamW, AnyCountAlignmentAndCopyHasTheHostsBits) {
  for (const Copied copied : all_copied)
    for (const Values values : {Values::ordinary, Values::awkward})
      for (const size_t count : {0, 1, 3, 127, 2048, 5001})
        for (const size_t offset : {0, 1, 3})
          for (const size_t apart : {0, 1}) {
            std::vector<std::unique_ptr<Arrays>> one;
            one.push_back(std::make_unique<Arrays>(count, copied, offset, offset + apart, values));
            check(one, 3);
          }
}

TEST(CudaAdamW, ManyStepsStayTheSame) {
  std::vector<std::unique_ptr<Arrays>> one;
  one.push_back(std::make_unique<Arrays>(20000, Copied::bf16, 0, 0, Values::ordinary));
  check(one, 100);
}

// The spans are more than one launch takes, and of all kinds. Some are empty.
TEST(CudaAdamW, MoreSpansThanALaunchTakesHaveTheHostsBits) {
  for (const size_t number : {2, 64, 65, 200}) {
    std::vector<std::unique_ptr<Arrays>> many;
    for (size_t s = 0; s < number; ++s)
      many.push_back(std::make_unique<Arrays>(s * 37 % 5 == 0 ? 0 : s * 131 % 5000, all_copied[s % 5], s % 4, s % 3,
                                              Values::ordinary));
    check(many, 2);
  }
}

TEST(CudaAdamW, NoSpansIsNothing) { ASSERT_LAUNCHED(cuda::adamw(gpu::stream(), make_step(1), {})); }

// As in a replayed graph, the launches stay the same, and the step is written to memory before.
TEST(CudaAdamW, AStepReadFromMemoryHasTheSameBits) {
  Arrays arrays(3000, Copied::fp16, 0, 0, Values::ordinary);
  OnGpu memory(sizeof(AdamW));
  auto *const in_memory = reinterpret_cast<AdamW *>(memory.data());
  const AdamWSpan host = arrays.host_span(), gpu = arrays.gpu_span();
  for (int number = 1; number <= 3; ++number) {
    kernels::adamw(make_step(number), {&host, 1});
    ASSERT_LAUNCHED(cuda::store_step(gpu::stream(), in_memory, make_step(number)));
    ASSERT_LAUNCHED(cuda::adamw_from(gpu::stream(), in_memory, {&gpu, 1}));
  }
  arrays.check();
}

void check_squares(size_t count, size_t granule, size_t offset, Values values) {
  Elements elements(FSDP_FLOAT32, count);
  elements.fill(static_cast<uint32_t>(count), values);
  OnGpu gpu_values(elements.data(), count * 4, offset * 4), result(sizeof(double)), scratch(cuda::scratch_bytes);
  ASSERT_LAUNCHED(cuda::sum_squares(gpu::stream(), reinterpret_cast<double *>(result.data()), gpu_values.floats(),
                                    count, granule, scratch.data()));
  const auto bytes = result.read();
  scratch.read();
  double actual;
  std::memcpy(&actual, bytes.data(), sizeof actual);
  const double expected = kernels::sum_squares(elements.floats(), count, granule);
  const bool equal = std::bit_cast<uint64_t>(actual) == std::bit_cast<uint64_t>(expected);
  ASSERT_TRUE(equal || (std::isnan(actual) && std::isnan(expected))) << count << " by " << granule;
}

TEST(CudaSumSquares, AnyCountAndGranuleHasTheHostsSum) {
  for (const size_t count : {0, 1, 2, 15, 16, 17, 127, 1000, 4096, 4097, 30000})
    for (const size_t granule : {0, 1, 2, 3, 15, 16, 17, 100, 768, 4095, 4096, 4097, 10000})
      for (const size_t offset : {0, 1}) check_squares(count, granule, offset, Values::ordinary);
  check_squares(5000, 64, 0, Values::awkward);
}

// There are more pieces than one launch takes. The second launch continues where the first stopped.
TEST(CudaSumSquares, MorePiecesThanALaunchTakesHaveTheHostsSum) {
  for (const size_t count : {32768, 32769, 65536, 65537}) check_squares(count, 1, 0, Values::ordinary);
  check_squares(400001, 3, 1, Values::ordinary);
  check_squares(3000000, 0, 0, Values::ordinary);
}

TEST(CudaSumValues, AnyCountIsAddedInOrder) {
  for (const size_t count : {0, 1, 7, 8, 9, 1000}) {
    // An empty array needs an address, too, and nothing is read behind the end.
    std::vector<double> values(count + 1, 1e300);
    for (size_t i = 0; i < count; ++i)
      values[i] = std::ldexp(1.0 + static_cast<double>(i) / 7, static_cast<int>(i * 13 % 60));
    OnGpu gpu_values(values.data(), count * sizeof(double), 0), result(sizeof(double));
    ASSERT_LAUNCHED(cuda::sum_values(gpu::stream(), reinterpret_cast<double *>(result.data()),
                                     reinterpret_cast<const double *>(gpu_values.data()), count));
    const auto bytes = result.read();
    double actual, expected = 0;
    std::memcpy(&actual, bytes.data(), sizeof actual);
    for (size_t i = 0; i < count; ++i) expected += values[i];
    ASSERT_EQ(actual, expected) << count;
    ASSERT_EQ(kernels::sum_values(values.data(), count), expected) << count;
  }
}

// The results are known: the shares are added in the order of slots, which differs from that of ranks, then the root is
// taken, and the factor is in fp32.
TEST(CudaFindNorm, OrderRootAndFactorAreTheHosts) {
  struct Expected {
    std::vector<double> shares;
    uint32_t slices, inner;
    double max_norm, squares, norm;
    float factor;
  };
  const double tiny = std::ldexp(1.0, -53);
  for (const Expected &of : {
           Expected{{9}, 1, 1, 0, 9, 3, 1},
           Expected{{4, 5}, 1, 2, 1.5, 9, 3, 0.5f},
           Expected{{4, 5}, 1, 2, 3, 9, 3, 1},
           Expected{{9}, 1, 1, 1, 9, 3, static_cast<float>(1.0 / 3)},
           // There are 3 inner ranks and 2 slices. Slot s is rank s % 2 * 3 + s / 2. Slot 0 is 1, and slots 1 and 2 are
           // half a step beyond.
           Expected{{1, tiny, 0, tiny, 0, 0}, 2, 3, 0, 1, 1, 1},
           Expected{{tiny, 1, 0, tiny, 0, 0}, 2, 3, 0, 1 + 2 * tiny, std::sqrt(1 + 2 * tiny), 1},
           Expected{{HUGE_VAL, 1}, 1, 2, 1, HUGE_VAL, HUGE_VAL, 1},
       }) {
    OnGpu shares(of.shares.data(), of.shares.size() * sizeof(double), 0), result(sizeof(Norm));
    const auto slots = static_cast<uint32_t>(of.shares.size());
    ASSERT_LAUNCHED(
        cuda::find_norm(gpu::stream(), reinterpret_cast<Norm *>(result.data()),
                        {reinterpret_cast<const double *>(shares.data()), slots, of.slices, of.inner, of.max_norm}));
    const auto bytes = result.read();
    Norm actual;
    std::memcpy(&actual, bytes.data(), sizeof actual);
    for (const Norm &norm : {actual, kernels::find_norm({of.shares.data(), slots, of.slices, of.inner, of.max_norm})}) {
      EXPECT_EQ(norm.squares, of.squares);
      EXPECT_EQ(norm.norm, of.norm);
      EXPECT_EQ(norm.factor, of.factor);
    }
  }
  const double nan = std::nan("");
  const Norm norm = kernels::find_norm({&nan, 1, 1, 1, 1});
  EXPECT_TRUE(std::isnan(norm.norm));
  EXPECT_EQ(norm.factor, 1);
}

TEST(CudaScaleBy, FactorsInMemoryHaveTheHostsBits) {
  for (const float factor : {1.0f, 0.3f, 0.0f})
    for (const size_t count : {1, 5, 5001}) {
      Elements values(FSDP_FLOAT32, count);
      values.fill(9, Values::awkward);
      OnGpu gpu_values(values.data(), count * 4, 4), gpu_factor(&factor, sizeof factor, 0);
      ASSERT_LAUNCHED(cuda::scale_by(gpu::stream(), gpu_values.floats(), gpu_factor.floats(), count));
      if (factor != 1) kernels::scale(values.floats(), factor, count);
      const auto actual = gpu_values.read();
      for (size_t i = 0; i < count; ++i) {
        const float a = test::read(actual.data(), FSDP_FLOAT32, i), e = values[i];
        ASSERT_TRUE(factor == 1 ? std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(e) : same(a, e)) << i;
      }
    }
}

// There are more sums than one launch takes, and some are empty. Their counts, granules and places do not fit together.
struct ManyFloats {
  std::vector<Elements> host;
  std::vector<std::unique_ptr<OnGpu>> gpu;

  explicit ManyFloats(const std::vector<size_t> &counts) {
    for (size_t s = 0; s < counts.size(); ++s) {
      host.emplace_back(FSDP_FLOAT32, counts[s]);
      host.back().fill(static_cast<uint32_t>(s), Values::ordinary);
      gpu.push_back(std::make_unique<OnGpu>(host.back().data(), counts[s] * 4, s % 4 * 4));
    }
  }
};

// Neither of these two sums fits into one launch. The first begins in the middle of a launch, the second where the
// first ends.
TEST(CudaSumSquares, SumsThatShareALaunchAreTheHosts) {
  const size_t pieces = (cuda::scratch_bytes - 256) / sizeof(double);
  for (const size_t number : {56, 57, 130}) {
    const size_t large = number == 130 ? 60 : number;
    const auto is_large = [&](size_t s) { return s == large || s == large + 1; };
    std::vector<size_t> counts, granules;
    for (size_t s = 0; s < number; ++s) {
      counts.push_back(is_large(s) ? pieces + 77 : s % 7 == 0 ? 0 : s * 131 % 9000);
      granules.push_back(is_large(s) ? 1 : s % 5 == 0 ? 0 : s * 17 % 5000 + 1);
    }
    ManyFloats values(counts);
    OnGpu results(number * sizeof(double)), scratch(cuda::scratch_bytes);
    std::vector<SquaresSpan> spans;
    for (size_t s = 0; s < number; ++s)
      spans.push_back(
          {reinterpret_cast<double *>(results.data()) + s, values.gpu[s]->floats(), counts[s], granules[s]});
    ASSERT_LAUNCHED(cuda::sum_squares(gpu::stream(), spans, scratch.data()));
    const auto bytes = results.read();
    scratch.read();
    for (size_t s = 0; s < number; ++s) {
      double actual;
      std::memcpy(&actual, bytes.data() + s * sizeof actual, sizeof actual);
      ASSERT_EQ(actual, kernels::sum_squares(values.host[s].floats(), counts[s], granules[s]))
          << "sum " << s << " of " << number;
    }
  }
}

// The numbers have 16 bits, or are fp32 numbers in two halves. The last two sums share no launch with the others.
TEST(CudaSumSquares, CompactNumbersGiveTheHostsBits) {
  constexpr size_t number = 45;
  std::vector<std::vector<uint16_t>> values(number);
  std::vector<std::unique_ptr<OnGpu>> on_gpu;
  OnGpu results(number * sizeof(double)), scratch(cuda::scratch_bytes);
  std::vector<CompactSquaresSpan> host, gpu;
  for (size_t s = 0; s < number; ++s) {
    const size_t count = s == 43 ? 40000 : s % 7 == 0 ? 0 : s * 131 % 9000;
    Elements numbers(s % 3 == 1 ? FSDP_FLOAT16 : FSDP_BFLOAT16, 2 * count);
    numbers.fill(static_cast<uint32_t>(s), Values::ordinary);
    const auto *const first = reinterpret_cast<const uint16_t *>(numbers.data());
    values[s].assign(first, first + 2 * count);
    const auto *const rests = s % 3 == 2 ? reinterpret_cast<const int16_t *>(values[s].data() + count) : nullptr;
    const uint64_t granule = s == 43 ? 1 : s % 5 == 0 ? 0 : s * 17 % 5000 + 1;
    const fsdp_dtype dtype = s % 3 == 1 ? FSDP_FLOAT16 : FSDP_BFLOAT16;
    host.push_back({nullptr, values[s].data(), rests, dtype, count, granule});
    on_gpu.push_back(std::make_unique<OnGpu>(values[s].data(), 4 * count, s % 4 * 2));
    const auto *const moved = reinterpret_cast<const uint16_t *>(on_gpu.back()->data());
    gpu.push_back({reinterpret_cast<double *>(results.data()) + s, moved,
                   rests ? reinterpret_cast<const int16_t *>(moved + count) : nullptr, dtype, count, granule});
  }
  ASSERT_LAUNCHED(cuda::sum_compact_squares(gpu::stream(), gpu, scratch.data()));
  const auto bytes = results.read();
  scratch.read();
  for (size_t s = 0; s < number; ++s) {
    double actual;
    std::memcpy(&actual, bytes.data() + s * sizeof actual, sizeof actual);
    ASSERT_EQ(actual, kernels::sum_compact_squares(host[s])) << "sum " << s;
  }
}

TEST(CudaScale, ManySpansAtOnceHaveTheHostsBits) {
  for (const bool in_memory : {false, true})
    for (const size_t number : {1, 192, 193, 500}) {
      std::vector<size_t> counts;
      for (size_t s = 0; s < number; ++s) counts.push_back(s % 7 == 0 ? 0 : s * 131 % 5000);
      ManyFloats values(counts);
      const float factor = 0.3f;
      OnGpu gpu_factor(&factor, sizeof factor);
      std::vector<FloatSpan> spans;
      for (size_t s = 0; s < number; ++s) spans.push_back({values.gpu[s]->floats(), counts[s]});
      ASSERT_LAUNCHED(in_memory ? cuda::scale_by(gpu::stream(), spans, gpu_factor.floats())
                                : cuda::scale(gpu::stream(), spans, factor));
      for (size_t s = 0; s < number; ++s) {
        kernels::scale(values.host[s].floats(), factor, counts[s]);
        const auto actual = values.gpu[s]->read();
        ASSERT_TRUE(std::equal(actual.begin(), actual.end(), static_cast<std::byte *>(values.host[s].data())))
            << "array " << s << " of " << number;
      }
    }
}

TEST(CudaCountNonfinite, AnyCountAndAlignmentHasTheHostsCount) {
  for (const size_t count : {0, 1, 2, 127, 5001, 100003})
    for (size_t offset = 0; offset < 4; ++offset)
      for (const bool all : {false, true}) {
        Elements values(FSDP_FLOAT32, count);
        values.fill(4, Values::awkward);
        if (all) std::fill_n(values.floats(), count, -HUGE_VALF);
        OnGpu gpu_values(values.data(), count * 4, offset * 4), result(sizeof(uint64_t));
        ASSERT_LAUNCHED(cuda::count_nonfinite(gpu::stream(), reinterpret_cast<uint64_t *>(result.data()),
                                              gpu_values.floats(), count));
        const auto bytes = result.read();
        uint64_t actual;
        std::memcpy(&actual, bytes.data(), sizeof actual);
        ASSERT_EQ(actual, kernels::count_nonfinite(values.floats(), count)) << count;
      }
}

TEST(CudaCountZeros, AnyCountAndAlignmentHasTheHostsCount) {
  for (const size_t count : {0, 1, 2, 127, 5001, 100003})
    for (size_t offset = 0; offset < 4; ++offset)
      for (const bool all : {false, true}) {
        Elements values(FSDP_FLOAT32, count);
        values.fill(4, Values::awkward);
        for (size_t i = 0; i < count; i += all ? 1 : 3) values.floats()[i] = i % 2 ? -0.0f : 0.0f;
        OnGpu gpu_values(values.data(), count * 4, offset * 4), result(sizeof(uint64_t));
        ASSERT_LAUNCHED(
            cuda::count_zeros(gpu::stream(), reinterpret_cast<uint64_t *>(result.data()), gpu_values.floats(), count));
        const auto bytes = result.read();
        uint64_t actual;
        std::memcpy(&actual, bytes.data(), sizeof actual);
        ASSERT_EQ(actual, kernels::count_zeros(values.floats(), count)) << count;
        ASSERT_GE(actual, all ? count : count / 3) << count;
      }
}

}  // namespace
}  // namespace fsdp::test
