// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <latch>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device/host/copy_policy.h"
#include "device/host/kernels.h"
#include "kernel_reference.h"

namespace fsdp::test {
namespace {

using device::kernels::CopyWay;

constexpr CopyWay ways[] = {CopyWay::past_caches, CopyWay::library, CopyWay::pages, CopyWay::string};

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

TEST(KernelCopy, ShortCopiesAreNotTimed) {
  for (const size_t bytes : {size_t{1}, size_t{4096}, device::kernels::min_chosen_bytes - 1}) {
    const auto choice = device::kernels::choose_copy(bytes);
    EXPECT_EQ(choice.way, CopyWay::library);
    EXPECT_EQ(choice.trial, nullptr);
  }
}

TEST(KernelCopy, TimesAreTakenUntilAWayIsFound) {
  const size_t bytes = device::kernels::min_chosen_bytes * 3 / 2;
  std::vector<char> from(bytes, 'x'), to(bytes);
  const uint32_t enough = device::kernels::copy_ways * device::kernels::CopyTrial::copies_per_way;
  for (uint32_t copy = 0; copy < enough; ++copy) device::kernels::copy_bytes(to.data(), from.data(), bytes);
  EXPECT_EQ(device::kernels::choose_copy(bytes).trial, nullptr);
}

using device::kernels::Processor;

#if defined(__x86_64__)
// Returns what the kernel says of the first processor, or nothing.
std::string read_cpu_info(const std::string &name) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t end = line.find_last_not_of(" \t", line.find(':') - 1);
    if (line.find(": ") != std::string::npos && line.substr(0, end + 1) == name)
      return line.substr(line.find(": ") + 2);
  }
  return {};
}

TEST(CopyPolicy, IdentifiesTheProcessorAsTheKernelDoes) {
  const std::string vendor = read_cpu_info("vendor_id"), family = read_cpu_info("cpu family");
  const std::string model = read_cpu_info("model"), flags = " " + read_cpu_info("flags") + " ";
  if (vendor.empty() || family.empty() || model.empty()) GTEST_SKIP() << "/proc/cpuinfo names no x86 processor";
  const Processor found = device::kernels::identify_processor();
  EXPECT_EQ(found.vendor == Processor::Vendor::intel, vendor == "GenuineIntel");
  EXPECT_EQ(found.vendor == Processor::Vendor::amd, vendor == "AuthenticAMD");
  EXPECT_EQ(std::to_string(found.family), family);
  EXPECT_EQ(std::to_string(found.model), model);
  EXPECT_EQ(found.fast_strings, flags.find(" erms ") != std::string::npos);
}
#endif

constexpr size_t small = size_t{64} << 10, middle = size_t{1} << 20, large = size_t{16} << 20;

TEST(CopyPolicy, HasAWayOnlyForProcessorsThatWereMeasured) {
  using device::kernels::find_measured_way;
  using enum Processor::Vendor;
  const Processor granite_rapids{intel, 6, 0xAD, true};
  for (const size_t bytes : {small, middle, large}) {
    for (const uint32_t zen5 : {0x02u, 0x11u, 0x24u, 0x44u, 0x70u})
      EXPECT_EQ(find_measured_way({amd, 0x1A, zen5, true}, bytes), CopyWay::string) << zen5;
    for (const uint32_t later : {0x30u, 0x50u, 0x80u, 0xC0u})
      EXPECT_EQ(find_measured_way({amd, 0x1A, later, true}, bytes), std::nullopt) << later;
    EXPECT_EQ(find_measured_way({amd, 0x19, 1, true}, bytes), std::nullopt);
    EXPECT_EQ(find_measured_way({intel, 6, 0xCF, true}, bytes), std::nullopt);
    EXPECT_EQ(find_measured_way({amd, 0x1A, 0x11, false}, bytes), std::nullopt);
    EXPECT_EQ(find_measured_way({}, bytes), std::nullopt);
  }
  EXPECT_EQ(find_measured_way(granite_rapids, middle - 1), CopyWay::string);
  EXPECT_EQ(find_measured_way(granite_rapids, middle), CopyWay::pages);
  EXPECT_EQ(find_measured_way(granite_rapids, large - 1), CopyWay::pages);
  EXPECT_EQ(find_measured_way(granite_rapids, large), CopyWay::past_caches);
}

std::vector<CopyWay> list_ways(bool fast_strings, size_t bytes) {
  Processor processor;
  processor.fast_strings = fast_strings;
  const auto listed = device::kernels::list_copy_ways(processor, bytes);
  return {listed.begin(), listed.end()};
}

TEST(CopyPolicy, TriesWhatMayBeFast) {
  using enum CopyWay;
  EXPECT_EQ(list_ways(true, large), (std::vector{past_caches, library, pages, string}));
  EXPECT_EQ(list_ways(false, large), (std::vector{past_caches, library, pages}));
  EXPECT_EQ(list_ways(true, middle), (std::vector{library, pages, string}));
  EXPECT_EQ(list_ways(false, small), (std::vector{library, pages}));
}

TEST(CopyPolicy, SizesOfOneTrialDifferByAnEighthAtMost) {
  using device::kernels::CopyTrials;
  for (size_t number = 0; number < CopyTrials::count; ++number) {
    const size_t least = CopyTrials::min_bytes(number);
    EXPECT_EQ(CopyTrials::number_of(least), number);
    if (number + 1 == CopyTrials::count) continue;
    EXPECT_EQ(CopyTrials::number_of(CopyTrials::min_bytes(number + 1) - 1), number);
    EXPECT_LE(CopyTrials::min_bytes(number + 1), least / 8 * 9);
  }
  EXPECT_EQ(CopyTrials::min_bytes(0), device::kernels::min_chosen_bytes);
  EXPECT_EQ(CopyTrials::number_of(SIZE_MAX), CopyTrials::count - 1);
}

using device::kernels::CopyChoice;
using device::kernels::CopyTrial;
using std::chrono::nanoseconds;

// Reports made-up times until the trial has found a way. time_of() gets a copy's way and number. Returns the number of
// copies.
template <class TimeOf>
size_t run(CopyTrial &trial, TimeOf &&time_of, size_t bytes = 1 << 20) {
  for (size_t copies = 0;; ++copies) {
    const CopyChoice choice = trial.next();
    if (!choice.trial) return copies;
    choice.trial->note(choice.way, bytes, nanoseconds(time_of(choice.way, copies)));
  }
}

TEST(CopyTrial, FindsTheFastestOfItsWays) {
  for (size_t count = 2; count <= 4; ++count)
    for (size_t first = 0; first + count <= 4; ++first) {
      const std::span tried = std::span(ways).subspan(first, count);
      for (const CopyWay fastest : tried) {
        CopyTrial trial(tried);
        EXPECT_EQ(run(trial, [&](CopyWay way, size_t) { return way == fastest ? 900 : 1000; }),
                  count * CopyTrial::copies_per_way);
        EXPECT_EQ(trial.next().way, fastest);
        EXPECT_EQ(trial.next().trial, nullptr);
      }
    }
}

TEST(CopyTrial, KeepsMemcpyUnlessAnotherWayIsClearlyFaster) {
  for (const int64_t time : {980, 950}) {
    CopyTrial trial(ways);
    run(trial, [&](CopyWay way, size_t) { return way == CopyWay::pages ? time : 1000; });
    EXPECT_EQ(trial.next().way, time == 950 ? CopyWay::pages : CopyWay::library);
  }
}

// Every second copy finds its source in the caches.
TEST(CopyTrial, IsNotMisledByAPatternOfCopies) {
  for (size_t count = 2; count <= 4; ++count)
    for (const size_t cached : {0u, 1u}) {
      const std::span tried = std::span(ways).last(count);
      CopyTrial trial(tried);
      run(trial, [&](CopyWay way, size_t copy) {
        return (copy % 2 == cached ? 1000 : 4000) * (way == CopyWay::string ? 9 : 10) / 10;
      });
      EXPECT_EQ(trial.next().way, CopyWay::string) << count << " ways, " << cached;
    }
}

// The first copies cause page faults, others are interrupted, and some find everything in the caches.
TEST(CopyTrial, IgnoresUnusualTimes) {
  CopyTrial trial(ways);
  run(trial, [](CopyWay way, size_t copy) {
    if (way == CopyWay::pages) return copy < 8 ? 9000 : 900;
    return copy < 4 ? 4000 : copy < 8 ? 500 : 1000;
  });
  EXPECT_EQ(trial.next().way, CopyWay::pages);
}

TEST(CopyTrial, ComparesTimesPerByte) {
  constexpr auto made_up = std::chrono::seconds(1);
  CopyTrial trial(ways);
  for (CopyChoice choice = trial.next(); choice.trial; choice = trial.next()) {
    const bool is_fastest = choice.way == CopyWay::string;  // by its larger copies, which take as long
    choice.trial->note(choice.way, is_fastest ? 9 << 17 : 1 << 20, made_up);
  }
  EXPECT_EQ(trial.next().way, CopyWay::string);
}

TEST(CopyTrial, EndsWhereThreadsCopyAtOnce) {
  CopyTrial trial(ways);
  std::latch all(4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      all.arrive_and_wait();
      run(trial, [](CopyWay way, size_t) {
        std::this_thread::yield();
        return way == CopyWay::string ? 5 : 9;
      });
    });
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(trial.next().way, CopyWay::string);
}

}  // namespace
}  // namespace fsdp::test
