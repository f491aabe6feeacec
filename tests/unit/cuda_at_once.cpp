// SPDX-License-Identifier: Apache-2.0
// Runs kernels at once on the calling thread, over its own memory, and tests how their launches fail.
#include <chrono>
#include <functional>
#include <new>

#include "cuda_memory.h"
#include "simulated_cuda/enqueue.h"

namespace {
cudaError_t next_result = cudaSuccess;
int launches = 0;
}  // namespace

cudaError_t simulated::enqueue(cudaStream_t, std::function<void()> kernel) {
  ++launches;
  if (next_result == cudaSuccess) kernel();
  return next_result;
}

namespace fsdp::test {

constexpr std::align_val_t alignment{256};
void *gpu::allocate(size_t bytes) { return ::operator new(bytes, alignment); }
void gpu::release(void *memory) { ::operator delete(memory, alignment); }
void gpu::copy(void *to, const void *from, size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}
device::cuda::kernels::Stream gpu::stream() { return nullptr; }

namespace {

namespace cuda = device::cuda::kernels;
using namespace device;

class CudaLaunch : public ::testing::Test {
 protected:
  void SetUp() override { launches = 0; }
  void TearDown() override { next_result = cudaSuccess; }
  CompactSpan compact_span(uint64_t count) {
    CompactSpan span{};
    span.weight = span.exp_avg = span.exp_avg_sq = values, span.grad = values, span.count = count;
    return span;
  }
  CompactSpan coded_span(uint64_t count) {
    CompactSpan span = compact_span(count);
    span.exp_avg_scales = span.exp_avg_sq_scales = values;
    return span;
  }
  RandomRounding rounding(uint64_t count) {
    return {values, reinterpret_cast<uint16_t *>(values), count, {}, {0, 8, 0}};
  }
  float values[8] = {};
  double scratch[cuda::scratch_bytes / sizeof(double)] = {};
  uint64_t count = 0;
  double sum = 0;
};

TEST_F(CudaLaunch, ErrorsAreReturned) {
  const AdamWSpan span{values, values, values, values, nullptr, 0, 8};
  const CompactSpan compact = compact_span(8);
  AdamW step{};
  next_result = cudaErrorLaunchOutOfResources;
  const int error = cudaErrorLaunchOutOfResources;
  EXPECT_EQ(cuda::cast(nullptr, values, FSDP_BFLOAT16, values, FSDP_FLOAT32, 8), error);
  EXPECT_EQ(cuda::add(nullptr, values, FSDP_FLOAT32, values, FSDP_FLOAT32, 8), error);
  EXPECT_EQ(cuda::scale(nullptr, values, 2, 8), error);
  EXPECT_EQ(cuda::rank_sum(nullptr, {reinterpret_cast<std::byte *>(values), 0, 1, FSDP_FLOAT32, FSDP_FLOAT32, values, 8,
                                     1, false}),
            error);
  EXPECT_EQ(cuda::sum_squares(nullptr, &sum, values, 8, 1, scratch), error);
  const CompactSquaresSpan half{&sum, reinterpret_cast<uint16_t *>(values), nullptr, FSDP_FLOAT16, 8, 1};
  EXPECT_EQ(cuda::sum_compact_squares(nullptr, {&half, 1}, scratch), error);
  EXPECT_EQ(cuda::count_nonfinite(nullptr, &count, values, 8), error);
  EXPECT_EQ(cuda::count_zeros(nullptr, &count, values, 8), error);
  Norm norm{};
  EXPECT_EQ(cuda::sum_values(nullptr, &sum, &sum, 1), error);
  EXPECT_EQ(cuda::find_norm(nullptr, &norm, {&sum, 1, 1, 1, 0}), error);
  EXPECT_EQ(cuda::scale_by(nullptr, values, values, 8), error);
  EXPECT_EQ(cuda::adamw(nullptr, step, {&span, 1}), error);
  EXPECT_EQ(cuda::adamw_from(nullptr, &step, {&span, 1}), error);
  EXPECT_EQ(cuda::compact_adamw(nullptr, step, {&compact, 1}), error);
  EXPECT_EQ(cuda::compact_adamw_from(nullptr, &step, {&compact, 1}), error);
  EXPECT_EQ(cuda::round_randomly(nullptr, rounding(8)), error);
  EXPECT_EQ(cuda::store_step(nullptr, &step, step), error);
  EXPECT_EQ(cuda::delay(nullptr, 1), error);
  EXPECT_EQ(launches, 18);  // an operation of two launches stops at the first failure
}

TEST_F(CudaLaunch, NoElementsNoLaunch) {
  const AdamWSpan span{values, values, values, values, nullptr, 0, 0};
  EXPECT_EQ(cuda::cast(nullptr, values, FSDP_BFLOAT16, values, FSDP_FLOAT32, 0), 0);
  EXPECT_EQ(cuda::add(nullptr, values, FSDP_FLOAT32, values, FSDP_FLOAT32, 0), 0);
  EXPECT_EQ(cuda::scale(nullptr, values, 2, 0), 0);
  EXPECT_EQ(cuda::scale_by(nullptr, values, values, 0), 0);
  EXPECT_EQ(cuda::adamw(nullptr, AdamW{}, {&span, 1}), 0);
  for (const CompactSpan &compact : {compact_span(0), coded_span(0)})
    EXPECT_EQ(cuda::compact_adamw(nullptr, AdamW{}, {&compact, 1}), 0);
  EXPECT_EQ(cuda::round_randomly(nullptr, rounding(0)), 0);
  EXPECT_EQ(launches, 0);
}

TEST_F(CudaLaunch, SpansAreBatched) {
  const std::vector<AdamWSpan> spans(130, AdamWSpan{values, values, values, values, nullptr, 0, 8});
  EXPECT_EQ(cuda::adamw(nullptr, AdamW{}, spans), 0);
  EXPECT_EQ(std::exchange(launches, 0), 3);
  std::vector<CompactSpan> compact;  // spans with codes are launched separately
  for (size_t s = 0; s < 66; ++s) compact.push_back(s % 2 ? compact_span(8) : coded_span(8));
  EXPECT_EQ(cuda::compact_adamw(nullptr, AdamW{}, compact), 0);
  EXPECT_EQ(launches, 4);
}

TEST_F(CudaLaunch, WorksOn8BitTensorsAreBatched) {
  uint8_t codes[4096] = {};
  uint64_t found[90] = {};
  std::vector<float> many(1024);
  const std::vector<Mxfp8Quantize> tiles(89, {many.data(), 32, 32, {}, false, codes, codes, codes, codes});
  EXPECT_EQ(cuda::quantize_mxfp8(nullptr, tiles, found), 0);
  EXPECT_EQ(std::exchange(launches, 0), 3);
  const std::vector<Fp8BlockQuantize> blocks(88, {values, 1, 8, false, false, codes, values});
  EXPECT_EQ(cuda::quantize_fp8_blocks(nullptr, blocks, found), 0);
  EXPECT_EQ(std::exchange(launches, 0), 2);
  const std::vector<Fp8Quantize> whole(160, {values, 8, false, values, codes});
  EXPECT_EQ(cuda::quantize_fp8(nullptr, whole), 0);
  EXPECT_EQ(std::exchange(launches, 0), 2);
  const std::vector<AmaxSpan> amaxes(97, {values, values, 8, false});
  EXPECT_EQ(cuda::find_amaxes(nullptr, amaxes), 0);
  EXPECT_EQ(launches, 4);
}

TEST_F(CudaLaunch, MatricesOfScalesAreOneLaunch) {
  uint8_t scales[3 * 4 * 2] = {}, tiles[3 * 512];
  EXPECT_EQ(cuda::swizzle_scales(nullptr, {scales, 4, 2, Mxfp8Form::row, tiles, 3}), 0);
  EXPECT_EQ(launches, 1);
}

TEST_F(CudaLaunch, SumsAndScalingsAreBatched) {
  std::vector<double> sums(112);
  std::vector<SquaresSpan> squares;
  for (double &one : sums) squares.push_back({&one, values, 8, 1});
  EXPECT_EQ(cuda::sum_squares(nullptr, squares, scratch), 0);
  EXPECT_EQ(std::exchange(launches, 0), 4);
  std::vector<CompactSquaresSpan> compact;
  for (size_t s = 0; s < 88; ++s)
    compact.push_back({&sums[s], reinterpret_cast<uint16_t *>(values), nullptr, FSDP_FLOAT16, 8, 1});
  EXPECT_EQ(cuda::sum_compact_squares(nullptr, compact, scratch), 0);
  EXPECT_EQ(std::exchange(launches, 0), 4);
  // One launch has no room for such a sum. Each further launch adds to the result of the previous one.
  for (const auto &[pieces, expected] : {std::pair{32768, 2}, {32769, 3}, {65536, 3}, {65537, 4}}) {
    const std::vector<float> many(static_cast<size_t>(pieces));
    EXPECT_EQ(cuda::sum_squares(nullptr, &sum, many.data(), many.size(), 1, scratch), 0);
    EXPECT_EQ(std::exchange(launches, 0), expected) << pieces;
  }
  const std::vector<FloatSpan> spans(192, FloatSpan{values, 8});
  EXPECT_EQ(cuda::scale(nullptr, spans, 1), 0);
  EXPECT_EQ(cuda::scale_by(nullptr, spans, values), 0);
  EXPECT_EQ(launches, 2);
}

TEST_F(CudaLaunch, ErrorsOf8BitKernelsAreReturned) {
  next_result = cudaErrorLaunchOutOfResources;
  const int error = cudaErrorLaunchOutOfResources;
  uint8_t codes[4096] = {};
  const Mxfp8Form row = Mxfp8Form::row;
  EXPECT_EQ(cuda::cast_to_float8(nullptr, codes, Float8::e4m3, values, FSDP_FLOAT32, 8), error);
  EXPECT_EQ(cuda::cast_from_float8(nullptr, values, FSDP_FLOAT32, codes, Float8::e4m3, 8), error);
  EXPECT_EQ(cuda::quantize_mxfp8(nullptr, {values, 32, 32, {}, false, codes, codes, codes, codes}), error);
  EXPECT_EQ(cuda::dequantize_mxfp8(nullptr, values, FSDP_FLOAT32, {codes, codes, 32, 32, row}), error);
  EXPECT_EQ(cuda::swizzle_scales(nullptr, {codes, 1, 1, row, codes}), error);
  EXPECT_EQ(cuda::find_amax(nullptr, values, values, 8, false), error);
  EXPECT_EQ(cuda::find_fp8_scales(nullptr, {values, 1, 8, false, values, values}), error);
  EXPECT_EQ(cuda::quantize_fp8(nullptr, {values, 8, false, values, codes}), error);
  EXPECT_EQ(cuda::dequantize_fp8(nullptr, values, FSDP_FLOAT32, {codes, 8, values}), error);
  EXPECT_EQ(cuda::quantize_fp8_blocks(nullptr, {values, 1, 8, false, false, codes, values}), error);
  EXPECT_EQ(cuda::dequantize_fp8_blocks(nullptr, values, FSDP_FLOAT32, {codes, values, 1, 8}), error);
  EXPECT_EQ(launches, 11);
}

// Covers each of the 65 kernels (tests/gpu/kernels/code_test.py counts them), and the copy of 16-bit elements for both
// of their types.
TEST_F(CudaLaunch, PrepareRunsEveryKernel) {
  EXPECT_EQ(cuda::prepare(nullptr, scratch), 0);
  EXPECT_EQ(launches, 70);
  next_result = cudaErrorLaunchOutOfResources;
  EXPECT_EQ(cuda::prepare(nullptr, scratch), static_cast<int>(cudaErrorLaunchOutOfResources));
}

TEST_F(CudaLaunch, DelayTakesItsTime) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(cuda::delay(nullptr, 2000), 0);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::microseconds(2000));
}

}  // namespace
}  // namespace fsdp::test
