// SPDX-License-Identifier: Apache-2.0
#include "kernel_reference.h"

namespace fsdp::test {
namespace {

using namespace device;

void check_add(fsdp_dtype to_dtype, fsdp_dtype from_dtype, size_t count, size_t offset) {
  Elements to(to_dtype, count + 1, offset), from(from_dtype, count, 0), expected(to_dtype, count + 1, 0);
  to.fill(1, Values::awkward);
  from.fill(2, Values::awkward);
  for (size_t i = 0; i < count; ++i) write(expected.data(), to_dtype, i, to[i] + from[i]);
  write(expected.data(), to_dtype, count, to[count]);
  kernels::add(to.data(), to_dtype, from.data(), from_dtype, count);
  for (size_t i = 0; i <= count; ++i)
    ASSERT_TRUE(same(to[i], expected[i])) << dtype_name(to_dtype) << " += " << dtype_name(from_dtype) << " at " << i;
}

TEST(KernelAdd, AllPairsSizesAndOffsetsMatchTheDefinition) {
  on_every_target([] {
    for (const fsdp_dtype to : dtypes)
      for (const fsdp_dtype from : dtypes)
        for (size_t count = 0; count < 68; ++count) check_add(to, from, count, count % 4);
    check_add(FSDP_BFLOAT16, FSDP_FLOAT32, 100003, 1);
  });
}

TEST(KernelScale, AnySizeAndOffsetMatchesTheDefinition) {
  on_every_target([] {
    for (size_t count = 0; count < 68; ++count)
      for (const size_t offset : {0, 1, 3}) {
        Elements values(FSDP_FLOAT32, count + 1, offset), before(FSDP_FLOAT32, count + 1, 0);
        values.fill(5, Values::awkward);
        before.fill(5, Values::awkward);
        kernels::scale(values.floats(), 0.7f, count);
        for (size_t i = 0; i < count; ++i) ASSERT_TRUE(same(values[i], before[i] * 0.7f));
        ASSERT_TRUE(same(values[count], before[count]));
      }
  });
}

TEST(KernelCopy, SizesAroundTheStringInstructionAreCopied) {
  constexpr size_t edge = size_t{64} << 10;
  for (const size_t count : {size_t{0}, size_t{1}, size_t{63}, edge - 1, edge, edge + 1, 3 * edge + 7})
    for (const size_t offset : {0, 1, 31}) {
      std::vector<uint8_t> from(count + 64), to(count + 64, 0xee);
      for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 31 + i / 251);
      kernels::copy_bytes(to.data() + offset, from.data() + 1, count);
      EXPECT_EQ(std::memcmp(to.data() + offset, from.data() + 1, count), 0) << count;
      EXPECT_EQ(to[offset + count], 0xee) << count;
    }
}

}  // namespace
}  // namespace fsdp::test
