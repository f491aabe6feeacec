// SPDX-License-Identifier: Apache-2.0
#include "transport/call/add.h"

#include "device/host/kernels.h"

namespace fsdp::transport {

void add_in_rank_order(const std::byte *base, uint64_t stride, uint32_t ranks, float *to, uint64_t count,
                       bool accumulate) {
  if (!accumulate)
    return device::kernels::rank_sum({base, stride, ranks, FSDP_FLOAT32, FSDP_FLOAT32, to, count, 1.0F, false});
  for (uint32_t r = 0; r < ranks; ++r) device::kernels::add(to, FSDP_FLOAT32, base + r * stride, FSDP_FLOAT32, count);
}

}  // namespace fsdp::transport
