// SPDX-License-Identifier: Apache-2.0
// How much of a GPU NCCL's kernels take: each of their thread blocks has a multiprocessor (SM) that the math has not.
#pragma once

#include <string>

#include "transport/nccl/library.h"

namespace fsdp::transport::nccl {

// As the environment says; `undefined`: NCCL's own choice.
struct BlockLimits {
  int least = undefined, most = undefined;  // of a collective's kernel
  int cluster = undefined;                  // of its blocks that are started together; from GPUs of Hopper's kind on
  int of_switches = undefined;              // of collectives by NVLink's switches

  bool operator==(const BlockLimits &) const = default;
};

// FSDP_NCCL_MIN_CTAS and its like. INVALID_ARGUMENT for what is no number, or out of range.
BlockLimits read_block_limits();
// UNSUPPORTED where this NCCL does not know of one that is set.
void check_block_limits(const BlockLimits &limits, const Library &library);
// What was asked for, for the log; empty: nothing.
std::string text_of(const BlockLimits &limits);
void apply(const BlockLimits &limits, Config &config);

}  // namespace fsdp::transport::nccl
