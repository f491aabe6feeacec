// SPDX-License-Identifier: Apache-2.0
// What every MessageCommunicator says and adds alike, whichever way its bytes travel: so they are compared and summed
// alike.
#pragma once

#include "comm/call/launch.h"

namespace fsdp::comm {

void add_spans(Launch &launch, std::span<const SumSpan> spans);
void add_spans(Launch &launch, std::span<const SliceSumSpan> spans, uint32_t ranks);
void add_spans(Launch &launch, std::span<const WholeSpan> spans);
void add_broadcast(Launch &launch, std::byte *data, uint64_t bytes, uint32_t root, uint32_t ranks);

// to = s0, += s1, ... or, to accumulate, to += s0, += s1, ..., where rank r's values are at base + r * stride: the same
// additions whatever pieces the values come in.
void add_in_rank_order(const std::byte *base, uint64_t stride, uint32_t ranks, float *to, uint64_t count,
                       bool accumulate);

}  // namespace fsdp::comm
