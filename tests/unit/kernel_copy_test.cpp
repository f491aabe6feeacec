// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "device/host/copy_policy.h"
#include "kernel_reference.h"

namespace fsdp::test {
namespace {

using device::kernels::CopyWay;

constexpr CopyWay ways[] = {CopyWay::library, CopyWay::string, CopyWay::pages, CopyWay::past_caches};

// Every byte arrives, and no byte beside it changes.
void check(CopyWay way, size_t bytes, size_t to_offset, size_t from_offset) {
  constexpr size_t guard = 128;
  std::vector<unsigned char> from(bytes + from_offset), to(bytes + to_offset + 2 * guard, 0xA5);
  std::mt19937 random(static_cast<unsigned>(bytes + to_offset));
  for (auto &byte : from) byte = static_cast<unsigned char>(random());
  unsigned char *begin = to.data() + guard + to_offset;
  device::kernels::copy_by(way, begin, from.data() + from_offset, bytes);
  ASSERT_EQ(std::memcmp(begin, from.data() + from_offset, bytes), 0) << bytes << " bytes";
  for (unsigned char *byte = to.data(); byte < begin; ++byte) ASSERT_EQ(*byte, 0xA5) << bytes << " bytes, before";
  for (size_t i = 0; i < guard; ++i) ASSERT_EQ(begin[bytes + i], 0xA5) << bytes << " bytes, behind";
}

TEST(KernelCopy, EveryWayCopiesEverySizeAndAlignment) {
  on_every_target([] {
    for (const CopyWay way : ways)
      for (const size_t bytes : {size_t{1}, size_t{63}, size_t{64}, size_t{4096}, size_t{4 * 4096 - 1},
                                 size_t{4 * 4096}, size_t{8 * 4096 + 65}, size_t{100'003}})
        for (const size_t offset : {0u, 1u, 16u, 63u}) {
          check(way, bytes, offset, 0);
          check(way, bytes, 0, offset);
          check(way, bytes, offset, 63 - offset);
        }
  });
}

TEST(KernelCopy, ChosenWayCopiesAcrossItsLimits) {
  for (const size_t limit : {size_t{64} << 10, size_t{1} << 20, size_t{16} << 20})
    for (const size_t bytes : {limit - 1, limit, limit + 4097})
      check(device::kernels::choose_copy(bytes).way, bytes, 4, 8);
}

TEST(CopyPolicy, KnowsOnlyProcessorsThatWereMeasured) {
  using device::kernels::find_measured_way;
  using device::kernels::Processor;
  using enum Processor::Vendor;
  const size_t small = size_t{64} << 10, middle = size_t{1} << 20, large = size_t{16} << 20;
  const Processor zen5{amd, 0x1A, 0x11, true}, zen3{amd, 0x19, 1, true}, granite_rapids{intel, 6, 0xAD, true};
  for (const size_t bytes : {small, middle, large}) {
    EXPECT_EQ(find_measured_way(zen5, bytes), CopyWay::string);
    EXPECT_EQ(find_measured_way(zen3, bytes), std::nullopt);
    EXPECT_EQ(find_measured_way({intel, 6, 0x9E, true}, bytes), std::nullopt);
    EXPECT_EQ(find_measured_way({amd, 0x1A, 0x11, false}, bytes), std::nullopt);
    EXPECT_EQ(find_measured_way({}, bytes), std::nullopt);
  }
  EXPECT_EQ(find_measured_way(granite_rapids, middle - 1), CopyWay::string);
  EXPECT_EQ(find_measured_way(granite_rapids, middle), CopyWay::pages);
  EXPECT_EQ(find_measured_way(granite_rapids, large - 1), CopyWay::pages);
  EXPECT_EQ(find_measured_way(granite_rapids, large), CopyWay::past_caches);
}

using device::kernels::CopyChoice;
using device::kernels::CopyTrial;
using std::chrono::nanoseconds;

// Copies until the trial needs no times. time_of() returns the time of a copy from its way and its number.
template <class TimeOf>
uint32_t run(CopyTrial &trial, TimeOf &&time_of, size_t bytes_of_even = 1 << 20, size_t bytes_of_odd = 1 << 20) {
  for (uint32_t copies = 0;; ++copies) {
    const CopyChoice choice = trial.next();
    if (!choice.trial) return copies;
    const size_t bytes = copies % 2 ? bytes_of_odd : bytes_of_even;
    choice.trial->note(choice.way, bytes, nanoseconds(time_of(choice.way, copies)));
  }
}

TEST(CopyTrial, FindsTheFastestOfItsWays) {
  for (const CopyWay fastest : ways) {
    CopyTrial trial(device::kernels::copy_ways);
    EXPECT_EQ(run(trial, [&](CopyWay way, uint32_t) { return way == fastest ? 900 : 1000; }), 4 * CopyTrial::rounds);
    EXPECT_EQ(trial.next().way, fastest);
    EXPECT_EQ(trial.next().trial, nullptr);
  }
}

TEST(CopyTrial, DoesNotTryTheStringInstructionWhereItIsSlow) {
  CopyTrial trial(device::kernels::copy_ways - 1);
  const auto time_of = [](CopyWay way, uint32_t) {
    EXPECT_NE(way, CopyWay::string);
    return way == CopyWay::past_caches ? 1 : 2;
  };
  EXPECT_EQ(run(trial, time_of), 3 * CopyTrial::rounds);
  EXPECT_EQ(trial.next().way, CopyWay::past_caches);
}

// The first copies fault pages in, and others are interrupted.
TEST(CopyTrial, OverlooksSlowCopiesOfAFastWay) {
  CopyTrial trial(device::kernels::copy_ways);
  run(trial, [](CopyWay way, uint32_t copy) {
    if (way != CopyWay::pages) return copy < 4 ? 4000 : 1000;
    return copy < 12 ? 9000 : 900;
  });
  EXPECT_EQ(trial.next().way, CopyWay::pages);
}

TEST(CopyTrial, ComparesTimesPerByte) {
  CopyTrial trial(device::kernels::copy_ways);
  const size_t small = 1 << 20, large = 4 << 20;
  // A byte of a large copy takes twice as long.
  const auto time_of = [&](CopyWay way, uint32_t copy) {
    const int64_t time = copy % 2 ? 8000 : 1000;
    return way == CopyWay::string ? time * 9 / 10 : time;
  };
  run(trial, time_of, small, large);
  EXPECT_EQ(trial.next().way, CopyWay::string);
}

TEST(CopyTrial, EndsWhereThreadsCopyAtOnce) {
  CopyTrial trial(device::kernels::copy_ways);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] { run(trial, [](CopyWay way, uint32_t) { return way == CopyWay::library ? 5 : 9; }); });
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(trial.next().way, CopyWay::library);
}

}  // namespace
}  // namespace fsdp::test
