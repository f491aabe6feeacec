// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <random>
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
    for (const size_t bytes : {limit - 1, limit, limit + 4097}) check(device::kernels::choose_copy(bytes), bytes, 4, 8);
}

}  // namespace
}  // namespace fsdp::test
