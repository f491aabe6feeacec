// SPDX-License-Identifier: Apache-2.0
// Tests that the CUDA kernels of weights and states in fewer bits give the bits of the host's kernels.
#include <memory>

#include "compact_spans.h"
#include "cuda_memory.h"

namespace fsdp::test {
namespace {

using namespace device;
namespace cuda = device::cuda::kernels;

AdamW compact_step(int number) {
  AdamW step = make_step(number);
  step.seed = 0xfedcba9876543210;
  return step;
}

// Holds the arrays of a span on the host, and copies on the GPU. Each copy begins some elements after an aligned
// address.
class Compact {
 public:
  // `apart`: the gradient has another alignment than the other arrays.
  Compact(CompactForm form, size_t count, size_t offset, bool apart, Values values, ElementNumbers numbers)
      : host_(form, count) {
    host_.numbers = numbers;
    host_.fill(static_cast<uint32_t>(count), values);
    const size_t weight_bytes = dtype_size(form.weight()), state_bytes = form.states == States::codes ? 1 : 4;
    const size_t bytes[] = {
        4, weight_bytes, 2, state_bytes, state_bytes, 4, 4, form.compute ? dtype_size(form.compute) : 1};
    const std::vector<Bytes *> arrays = host_.all();
    for (size_t a = 0; a < arrays.size(); ++a)
      gpu_.push_back(std::make_unique<OnGpu>(arrays[a]->data(), arrays[a]->count(),
                                             bytes[a] * (offset + (a == 0 && apart ? 1 : 0))));
  }
  CompactSpan host_span() { return host_.span(); }
  CompactSpan gpu_span() {
    std::vector<OnGpu *> arrays;
    for (auto &one : gpu_) arrays.push_back(one.get());
    return host_.span_of(arrays);
  }
  void check() {
    const CompactForm &form = host_.form;
    const bool codes = form.states == States::codes;
    expect_same(1, form.weight(), "weight");
    expect_same(2, 0, "rest");
    expect_same(3, codes ? 0 : FSDP_FLOAT32, "exp_avg");
    expect_same(4, codes ? 0 : FSDP_FLOAT32, "exp_avg_sq");
    expect_same(5, FSDP_FLOAT32, "scale of exp_avg");
    expect_same(6, FSDP_FLOAT32, "scale of exp_avg_sq");
    expect_same(7, form.compute, "compute");
  }

 private:
  // With dtype 0 the arrays are compared as bytes.
  void expect_same(size_t a, fsdp_dtype dtype, const char *what) {
    Bytes &expected = *host_.all()[a];
    const std::vector<std::byte> actual = gpu_[a]->read();
    for (size_t i = 0; i < actual.size() / (dtype ? dtype_size(dtype) : 1); ++i)
      ASSERT_TRUE(dtype ? same(test::read(actual.data(), dtype, i), test::read(expected.data(), dtype, i))
                        : actual[i] == expected.data()[i])
          << what << " " << i << " of " << host_.count << ", form " << int(host_.form.form) << ", compute "
          << host_.form.compute;
  }

  CompactArrays host_;
  std::vector<std::unique_ptr<OnGpu>> gpu_;
};

using Compacts = std::vector<std::unique_ptr<Compact>>;

void check(Compacts &all, int steps) {
  std::vector<CompactSpan> host, gpu;
  for (auto &one : all) host.push_back(one->host_span()), gpu.push_back(one->gpu_span());
  for (int number = 1; number <= steps; ++number) {
    kernels::compact_adamw(compact_step(number), host);
    ASSERT_LAUNCHED(cuda::compact_adamw(gpu::stream(), compact_step(number), gpu));
  }
  for (auto &one : all) one->check();
}

void check_one(CompactForm form, size_t count, size_t offset, bool apart, Values values, ElementNumbers numbers) {
  Compacts one;
  one.push_back(std::make_unique<Compact>(form, count, offset, apart, values, numbers));
  check(one, 3);
}

TEST(CudaCompactAdamW, EveryFormCountAndAlignmentHasTheHostsBits) {
  for (const CompactForm &form : compact_forms)
    for (const Values values : {Values::ordinary, Values::awkward})
      for (const size_t count : {0, 1, 3, 127, 256, 511, 2049})
        for (const size_t offset : {0, 3})
          for (const bool apart : {false, true})
            check_one(form, count, offset, apart, values, {count % 7, count ? count : 1, 0});
}

TEST(CudaCompactAdamW, ElementsOfABoxHaveTheirNumbersInTheTensor) {
  for (const States states : {States::fp32, States::codes})
    for (const ElementNumbers numbers :
         {ElementNumbers{3, 1, 7}, {6, 13, 100}, {1000, 48, 64}, {9, 700, 5001}, {(uint64_t{1} << 35) - 70, 96, 96}})
      check_one({MainForm::rounded, states}, 1500, 0, false, Values::ordinary, numbers);
}

// The spans have all forms, and some are empty.
TEST(CudaCompactAdamW, MoreSpansThanALaunchTakesHaveTheHostsBits) {
  for (const size_t number : {2, 32, 33, 130}) {
    Compacts many;
    for (size_t s = 0; s < number; ++s) {
      const size_t count = s * 37 % 5 == 0 ? 0 : s * 131 % 3000;
      many.push_back(std::make_unique<Compact>(compact_forms[s % std::size(compact_forms)], count, s % 4, s % 3 == 0,
                                               Values::ordinary, ElementNumbers{s, count ? count : 1, 0}));
    }
    check(many, 2);
  }
}

TEST(CudaCompactAdamW, ManyStepsHaveTheHostsBits) {
  for (const CompactForm form : {CompactForm{MainForm::split16, States::codes}, {MainForm::rounded, States::codes}}) {
    Compacts one;
    one.push_back(std::make_unique<Compact>(form, 5000, 0, false, Values::ordinary, ElementNumbers{0, 5000, 0}));
    check(one, 30);
  }
}

TEST(CudaCompactAdamW, NoSpansAreNoError) { ASSERT_LAUNCHED(cuda::compact_adamw(gpu::stream(), compact_step(1), {})); }

// A replayed graph does the same. Its launches do not change, and the step is written to memory before each replay.
TEST(CudaCompactAdamW, AStepReadFromMemoryHasTheSameBits) {
  for (const States states : {States::fp32, States::codes}) {
    Compact arrays({MainForm::rounded, states}, 3000, 0, false, Values::ordinary, {0, 3000, 0});
    OnGpu memory(sizeof(AdamW));
    auto *const in_memory = reinterpret_cast<AdamW *>(memory.data());
    const CompactSpan host = arrays.host_span(), gpu = arrays.gpu_span();
    for (int number = 1; number <= 3; ++number) {
      kernels::compact_adamw(compact_step(number), {&host, 1});
      ASSERT_LAUNCHED(cuda::store_step(gpu::stream(), in_memory, compact_step(number)));
      ASSERT_LAUNCHED(cuda::compact_adamw_from(gpu::stream(), in_memory, {&gpu, 1}));
    }
    arrays.check();
  }
}

TEST(CudaRandomRounding, EveryCountAlignmentAndBoxHasTheHostsBits) {
  const RoundingKey key{0xfedcba9876543210, 0x89abcdef, 0x80000001};
  for (const size_t count : {0, 1, 2, 3, 5, 127, 4097})
    for (size_t offset = 0; offset < 4; ++offset)
      for (const size_t apart : {0, 1})
        for (const ElementNumbers numbers : {ElementNumbers{0, 5000, 0},
                                             {(uint64_t{1} << 35) - 77, 5000, 0},
                                             {3, 1, 7},
                                             {6, 13, 100},
                                             {1000, 48, 64}}) {
          Elements from(FSDP_FLOAT32, count);
          from.fill(static_cast<uint32_t>(count), Values::awkward);
          std::vector<uint16_t> expected(count);
          kernels::round_randomly({from.floats(), expected.data(), count, key, numbers});
          OnGpu gpu_from(from.data(), 4 * count, 4 * offset), to(2 * count, 2 * (offset + apart));
          ASSERT_LAUNCHED(cuda::round_randomly(
              gpu::stream(), {gpu_from.floats(), reinterpret_cast<uint16_t *>(to.data()), count, key, numbers}));
          const std::vector<std::byte> actual = to.read();
          ASSERT_TRUE(count == 0 || std::memcmp(actual.data(), expected.data(), 2 * count) == 0)
              << count << " from " << numbers.first;
        }
}

}  // namespace
}  // namespace fsdp::test
