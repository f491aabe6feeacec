// SPDX-License-Identifier: Apache-2.0
// The additions of messages on the host, whichever way they travel: so their bits are equal.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::transport {

// to = s0, += s1, ... or, to accumulate, to += s0, += s1, ..., where rank r's values are at base + r * stride: the same
// additions whatever pieces the values come in.
void add_in_rank_order(const std::byte *base, uint64_t stride, uint32_t ranks, float *to, uint64_t count,
                       bool accumulate);

}  // namespace fsdp::transport
