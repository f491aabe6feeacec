// SPDX-License-Identifier: Apache-2.0
// The library's launches run nvcc's PTX over the memory of this process. This program contains the tests of the CUDA
// kernels, which compare them with the host's kernels. It does not check ptxas, concurrency between blocks, or speed.
//
// usage: ptx FILE.ptx... [GoogleTest's options]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <new>

#include "cuda_memory.h"
#include "device/host/kernels.h"
#include "ptx/runtime.h"
#include "ptx/warp.h"

namespace {
std::vector<std::pair<std::string, std::string>> files;  // name and text
uint64_t bytes_read = 0;
constexpr std::align_val_t alignment{256};
}  // namespace

namespace fsdp::test {

void *gpu::allocate(size_t bytes) {
  void *const memory = ::operator new(bytes, alignment);
  ptx::own(memory, bytes);
  return memory;
}
void gpu::release(void *memory) {
  ptx::disown(memory);
  ::operator delete(memory, alignment);
}
void gpu::copy(void *to, const void *from, size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
  bytes_read += bytes;
}
device::cuda::kernels::Stream gpu::stream() { return nullptr; }

namespace {

namespace cuda = device::cuda::kernels;

ptx::Module all_kernels() {
  ptx::Module all;
  for (const auto &[name, text] : files) all.merge(ptx::parse(text, name));
  return all;
}

// Finds the first kernel whose name contains `which`. Returns its text behind ".entry" and before the next kernel.
std::pair<size_t, size_t> find_kernel(const std::string &text, const std::string &which) {
  for (size_t at = text.find(".entry "); at != text.npos; at = text.find(".entry ", at + 1))
    if (text.substr(at, text.find('(', at) - at).find(which) != std::string::npos)
      return {at, std::min(text.find(".entry ", at + 1), text.size())};
  return {text.npos, text.npos};
}

// Returns all kernels, with `to` instead of each `from` in the first kernel whose name contains `which`.
ptx::Module spoilt_kernels(const std::string &which, const std::string &from, const std::string &to) {
  ptx::Module all;
  int done = 0;
  for (auto [name, text] : files) {
    if (const auto [first, end] = find_kernel(text, which); done == 0 && first != text.npos) {
      std::string kernel = text.substr(first, end - first);
      for (size_t at = kernel.find(from); at != kernel.npos; at = kernel.find(from, at + to.size()), ++done)
        kernel.replace(at, from.size(), to);
      text.replace(first, end - first, kernel);
    }
    all.merge(ptx::parse(text, name));
  }
  EXPECT_GT(done, 0) << "no " << from << " in " << which;
  return all;
}

// Makes wrong launches; each must be noticed.
class Faults : public ::testing::Test {
 protected:
  void TearDown() override {
    ptx::take_fault();
    ptx::use(all_kernels());
  }

  static float scaled() {
    const float given[] = {2.5f};
    OnGpu values(given, sizeof given);
    EXPECT_EQ(cuda::scale(gpu::stream(), values.floats(), 3.0f, 1), 0);
    float value = 0;
    std::memcpy(&value, values.read().data(), sizeof value);
    return value;
  }

  static device::AdamW step_of_one() {
    device::AdamW step{};
    step.lr = step.correction1 = step.correction2 = 1;
    step.first = step.second = device::average_of(0.9);
    return step;
  }

  static double squares() {
    const std::vector<float> given(1000, 2.0f);
    OnGpu values(given.data(), given.size() * sizeof(float)), result(sizeof(double)), scratch(cuda::scratch_bytes);
    EXPECT_EQ(cuda::sum_squares(gpu::stream(), reinterpret_cast<double *>(result.data()), values.floats(), given.size(),
                                given.size(), scratch.data()),
              0);
    double value = 0;
    std::memcpy(&value, result.read().data(), sizeof value);
    return value;
  }
};

TEST_F(Faults, AProductThatIsASumIsSeen) {
  EXPECT_EQ(scaled(), 7.5f);
  ptx::use(spoilt_kernels("5Scale", "mul.rn.f32", "add.rn.f32"));
  EXPECT_NE(scaled(), 7.5f);
}

TEST_F(Faults, AMissingBarrierIsSeen) {
  EXPECT_EQ(squares(), 4000.0);
  ptx::use(spoilt_kernels("SumPieces", "bar.sync \t0;", ""));
  EXPECT_NE(squares(), 4000.0);
}

// States in codes need two barriers: one after the threads have made their shared data, and one after they have found
// their results.
TEST_F(Faults, EachMissingBarrierOfCodesIsSeen) {
  const auto first_code = [] {
    const float grads[256] = {0.5f};
    OnGpu weight(1024), grad(grads, 1024), average(256), square(256), scales(8);
    device::CompactSpan span{};
    span.weight = weight.data(), span.grad = grad.floats(), span.exp_avg = average.data();
    span.exp_avg_sq = square.data(), span.count = 256;
    span.exp_avg_scales = scales.floats(), span.exp_avg_sq_scales = scales.floats() + 1;
    std::memset(scales.data(), 0, 8);
    EXPECT_EQ(cuda::compact_adamw(gpu::stream(), step_of_one(), {&span, 1}), 0);
    return std::to_integer<int>(average.read()[0]);
  };
  EXPECT_EQ(first_code(), 255);
  ptx::use(spoilt_kernels("CodedUpdate", "bar.sync \t0;", ""));
  EXPECT_NE(first_code(), 255);
}

TEST_F(Faults, AnAccessThatIsNotAlignedIsRefused) {
  OnGpu memory(64);
  EXPECT_NE(cuda::scale(gpu::stream(), reinterpret_cast<float *>(memory.data() + 2), 3.0f, 1), 0);
  EXPECT_NE(ptx::take_fault().find("not aligned"), std::string::npos);
}

TEST_F(Faults, AnAccessBehindTheEndIsRefused) {
  OnGpu memory(64);
  EXPECT_NE(cuda::scale(gpu::stream(), memory.floats(), 3.0f, 200), 0);  // the memory around the 64 bytes has 256
  EXPECT_NE(ptx::take_fault().find("nobody's memory"), std::string::npos);
}

TEST_F(Faults, AFetchOfForeignMemoryIsRefused) {
  ptx::use(spoilt_kernels("AddPieces", "prefetch.L2 [", "prefetch.L2 [0];  // ["));
  OnGpu values(4), result(sizeof(double)), scratch(cuda::scratch_bytes);
  EXPECT_NE(cuda::sum_squares(gpu::stream(), reinterpret_cast<double *>(result.data()), values.floats(), 1, 0,
                              scratch.data()),
            0);
  EXPECT_NE(ptx::take_fault().find("1 bytes at"), std::string::npos);
}

TEST_F(Faults, AnOperationThatIsNotKnownIsNamed) {
  try {
    spoilt_kernels("5Scale", "mul.rn.f32", "fma.rn.f32");
    FAIL() << "a fused operation was taken";
  } catch (const ptx::Fault &fault) {
    EXPECT_NE(std::string(fault.what()).find("not known here: fma.rn.f32"), std::string::npos) << fault.what();
  }
}

TEST(Ptx, EveryKernelRuns) {
  OnGpu scratch(cuda::scratch_bytes);
  EXPECT_EQ(cuda::prepare(gpu::stream(), scratch.data()), 0) << ptx::take_fault();
  EXPECT_EQ(ptx::idle_kernels(), std::vector<std::string>());
}

// The input has only NaN. A block adds its result once, however many processors a GPU has.
TEST(Ptx, ABlockAddsItsCountOnce) {
  constexpr uint64_t of_block = 4096, max_blocks = 1024;
  for (const uint64_t count : {uint64_t{1}, 2 * of_block, 3 * of_block + 1, (max_blocks + 1) * of_block}) {
    const std::vector<float> given(count, std::nanf(""));
    OnGpu values(given.data(), count * sizeof(float)), result(8);
    ptx::take_atomics();
    ASSERT_LAUNCHED(
        cuda::count_nonfinite(gpu::stream(), reinterpret_cast<uint64_t *>(result.data()), values.floats(), count));
    EXPECT_EQ(ptx::take_atomics(), std::clamp(count / of_block, uint64_t{1}, max_blocks)) << count;
    uint64_t found = 0;
    std::memcpy(&found, result.read().data(), sizeof found);
    EXPECT_EQ(found, count);
  }
}

// The same holds for the kernels that quantize blocks. If there is no place for counts, nothing is added.
TEST(Ptx, ABlockAddsWhatItHasNotQuantizedOnce) {
  constexpr uint64_t rows = 96, columns = 256, count = rows * columns;
  const std::vector<float> given(count, std::nanf(""));
  const uint64_t none[2] = {};
  OnGpu values(given.data(), count * sizeof(float)), codes(4 * count), scales(count), found(none, sizeof none);
  auto *const to = reinterpret_cast<uint8_t *>(codes.data());
  const device::Mxfp8Quantize tiles{values.floats(), rows,       columns,       {}, false, to,
                                    to + 2 * count,  to + count, to + 3 * count};
  const device::Fp8BlockQuantize blocks{values.floats(), rows, columns, false, false, to, scales.floats()};
  auto *const counts = reinterpret_cast<uint64_t *>(found.data());
  ptx::take_atomics();
  ASSERT_LAUNCHED(cuda::quantize_mxfp8(gpu::stream(), {&tiles, 1}, counts));
  EXPECT_EQ(ptx::take_atomics(), rows / 32 * columns / 128);
  ASSERT_LAUNCHED(cuda::quantize_fp8_blocks(gpu::stream(), {&blocks, 1}, counts + 1));
  EXPECT_EQ(ptx::take_atomics(), columns / 128);
  uint64_t counted[2];
  std::memcpy(counted, found.read().data(), sizeof counted);
  EXPECT_EQ(counted[0], count / 32);
  EXPECT_EQ(counted[1], count);
  ASSERT_LAUNCHED(cuda::quantize_mxfp8(gpu::stream(), tiles));
  ASSERT_LAUNCHED(cuda::quantize_fp8_blocks(gpu::stream(), blocks));
  EXPECT_EQ(ptx::take_atomics(), 0u);
}

// A chain of additions reads lines of 16 sums. It does not wait for lines that other threads of its block have
// prefetched.
TEST(Ptx, ChainsAreFetchedAhead) {
  constexpr uint64_t of_launch = 32768;
  const auto prefetches = [](uint64_t pieces) {
    const std::vector<float> given(pieces, 1.0f);
    OnGpu values(given.data(), pieces * sizeof(float)), result(sizeof(double)), scratch(cuda::scratch_bytes);
    ptx::take_prefetches();
    EXPECT_EQ(cuda::sum_squares(gpu::stream(), reinterpret_cast<double *>(result.data()), values.floats(), pieces, 1,
                                scratch.data()),
              0);
    double sum = 0;
    std::memcpy(&sum, result.read().data(), sizeof sum);
    EXPECT_EQ(sum, pieces);
    return ptx::take_prefetches();
  };
  EXPECT_EQ(prefetches(1), 1u);
  EXPECT_EQ(prefetches(5000), 313u);
  EXPECT_EQ(prefetches(2 * of_launch), 2 * of_launch / 16);
  EXPECT_EQ(prefetches(2 * of_launch + 17), 2 * of_launch / 16 + 2);
}

// The arrays consist of whole packs of 4 elements, so no thread has single elements.
class WideAccesses : public ::testing::Test {
 protected:
  static constexpr uint64_t count = 4096 + 4 * 300, packs = count / 4;
  using ByBytes = std::map<unsigned, uint64_t>;

  void SetUp() override { ptx::take_accesses(); }

  // Runs an update that publishes in this dtype, or one that does not publish.
  static ptx::Accesses update(fsdp_dtype dtype, bool publishes) {
    OnGpu weight(count * 4), grad(count * 4), average(count * 4), square(count * 4), copy(count * 4);
    const device::AdamWSpan span{
        weight.floats(), grad.floats(), average.floats(), square.floats(), publishes ? copy.data() : nullptr,
        dtype,           count};
    EXPECT_EQ(cuda::adamw(gpu::stream(), {}, {&span, 1}), 0) << ptx::take_fault();
    return ptx::take_accesses();
  }
};

TEST_F(WideAccesses, AdamWReadsAndWritesWideWhereItMay) {
  EXPECT_EQ(update(FSDP_FLOAT32, false).loads, (ByBytes{{16, 4 * packs}}));
  EXPECT_EQ(update(FSDP_FLOAT32, false).stores, (ByBytes{{16, 3 * packs}}));
  EXPECT_EQ(update(FSDP_FLOAT32, true).stores, (ByBytes{{16, 4 * packs}}));
  EXPECT_EQ(update(FSDP_BFLOAT16, true).stores, (ByBytes{{8, packs}, {16, 3 * packs}}));
  EXPECT_EQ(update(FSDP_FLOAT16, true).stores, (ByBytes{{8, packs}, {16, 3 * packs}}));
}

TEST_F(WideAccesses, WeightsAndStatesInFewerBitsAreReadAndWrittenWide) {
  using device::MainForm;
  OnGpu weight(count * 4), rest(count * 2), grad(count * 4), average(count * 4), square(count * 4), scales(count);
  const auto update_compact = [&](MainForm form, bool codes) {
    device::CompactSpan span{};
    span.weight = weight.data(), span.rest = reinterpret_cast<int16_t *>(rest.data()), span.grad = grad.floats();
    span.exp_avg = average.data(), span.exp_avg_sq = square.data(), span.form = form;
    span.exp_avg_scales = codes ? scales.floats() : nullptr;
    span.exp_avg_sq_scales = codes ? scales.floats() + count / 256 : nullptr;
    span.numbers = {0, count, 0}, span.count = codes ? count / 256 * 256 : count;
    EXPECT_EQ(cuda::compact_adamw(gpu::stream(), {}, {&span, 1}), 0) << ptx::take_fault();
    return ptx::take_accesses();
  };
  EXPECT_EQ(update_compact(MainForm::split16, false).loads, (ByBytes{{8, 2 * packs}, {16, 3 * packs}}));
  EXPECT_EQ(update_compact(MainForm::split16, false).stores, (ByBytes{{8, 2 * packs}, {16, 2 * packs}}));
  EXPECT_EQ(update_compact(MainForm::rounded, false).stores, (ByBytes{{8, packs}, {16, 2 * packs}}));
  const uint64_t coded_blocks = count / 256, coded_packs = coded_blocks * 64;
  EXPECT_EQ(update_compact(MainForm::float32, true).stores,
            (ByBytes{{4, 2 * coded_packs + 2 * coded_blocks}, {16, coded_packs}}));
  EXPECT_EQ(update_compact(MainForm::split16, true).stores,
            (ByBytes{{4, 2 * coded_packs + 2 * coded_blocks}, {8, 2 * coded_packs}}));
}

TEST_F(WideAccesses, CastsReadAndWriteWideWhereTheyMay) {
  constexpr fsdp_dtype dtypes[] = {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16};
  for (const fsdp_dtype to : dtypes)
    for (const fsdp_dtype from : dtypes) {
      OnGpu source(count * 4), target(count * 4);
      ASSERT_EQ(cuda::cast(gpu::stream(), target.data(), to, source.data(), from, count), 0);
      const auto [loads, stores] = ptx::take_accesses();
      EXPECT_EQ(loads, (ByBytes{{from == FSDP_FLOAT32 ? 16 : 8, packs}})) << from << " to " << to;
      EXPECT_EQ(stores, (ByBytes{{to == FSDP_FLOAT32 ? 16 : 8, packs}})) << from << " to " << to;
    }
}

TEST_F(WideAccesses, OfSumsAndProducts) {
  OnGpu values(count * 4), addends(2 * count * 4);
  ASSERT_EQ(cuda::scale(gpu::stream(), values.floats(), 0.5f, count), 0);
  EXPECT_EQ(ptx::take_accesses().stores, (ByBytes{{16, packs}})) << "scale";
  ASSERT_EQ(cuda::add(gpu::stream(), values.data(), FSDP_BFLOAT16, addends.data(), FSDP_FLOAT32, count), 0);
  EXPECT_EQ(ptx::take_accesses().stores, (ByBytes{{8, packs}})) << "add";
  ASSERT_EQ(cuda::rank_sum(gpu::stream(), {addends.data(), count * 4, 2, FSDP_FLOAT32, FSDP_FLOAT32, values.floats(),
                                           count, 1.0f, true}),
            0);
  const auto [loads, stores] = ptx::take_accesses();
  EXPECT_EQ(loads, (ByBytes{{16, 3 * packs}})) << "rank_sum";
  EXPECT_EQ(stores, (ByBytes{{16, packs}})) << "rank_sum";
}

// The kernel reads every number once and writes codes four at a time.
TEST_F(WideAccesses, Of8BitNumbers) {
  constexpr uint64_t rows = 128, columns = 256, numbers = rows * columns, of_all = numbers / 4;
  OnGpu values(numbers * 4), codes(4 * numbers), scales(numbers);
  auto *const to = reinterpret_cast<uint8_t *>(codes.data());
  const device::Mxfp8Quantize tiles{values.floats(),  rows,         columns,         {}, false, to,
                                    to + 2 * numbers, to + numbers, to + 3 * numbers};
  ASSERT_LAUNCHED(cuda::quantize_mxfp8(gpu::stream(), tiles));
  ptx::Accesses seen = ptx::take_accesses();
  EXPECT_EQ(seen.loads, (ByBytes{{16, of_all}})) << "MXFP8";
  EXPECT_EQ(seen.stores, (ByBytes{{1, 2 * numbers / 32}, {4, 2 * of_all}})) << "MXFP8";
  ASSERT_LAUNCHED(
      cuda::quantize_fp8_blocks(gpu::stream(), {values.floats(), rows, columns, false, false, to, scales.floats()}));
  seen = ptx::take_accesses();
  EXPECT_EQ(seen.loads, (ByBytes{{16, of_all}})) << "blocks";
  EXPECT_EQ(seen.stores, (ByBytes{{4, of_all + columns / 128}})) << "blocks";
  ASSERT_LAUNCHED(cuda::find_amax(gpu::stream(), scales.floats(), values.floats(), numbers, false));
  seen = ptx::take_accesses();
  EXPECT_EQ(seen.loads, (ByBytes{{16, of_all}})) << "amax";
  ASSERT_LAUNCHED(cuda::quantize_fp8(gpu::stream(), {values.floats(), numbers, true, scales.floats(), to}));
  seen = ptx::take_accesses();
  EXPECT_EQ(seen.loads[16], of_all) << "one scale";
  EXPECT_EQ(seen.stores, (ByBytes{{4, of_all}})) << "one scale";
}

// Prints the reason why a launch was refused, below the test's own message.
class TellFaults : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult &result) override {
    if (const std::string fault = ptx::take_fault(); result.failed() && !fault.empty())
      std::printf("%s", fault.c_str());
  }
};

}  // namespace
}  // namespace fsdp::test

int main(int argc, char **argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i]);
    files.emplace_back(argv[i], std::string(std::istreambuf_iterator<char>(file), {}));
  }
  ptx::use(fsdp::test::all_kernels());
  if (ptx::kernel_count() == 0) {
    std::fprintf(stderr, "usage: ptx FILE.ptx... [GoogleTest's options]\n");
    return 2;
  }
  ::testing::UnitTest::GetInstance()->listeners().Append(new fsdp::test::TellFaults);
  const int failed = RUN_ALL_TESTS();
  std::printf("%zu kernels, %llu bytes to and from their memory\n", ptx::kernel_count(),
              static_cast<unsigned long long>(bytes_read));
  return failed;
}
