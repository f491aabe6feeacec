// SPDX-License-Identifier: Apache-2.0
// What a call of NCCL returned, as an Error.
#pragma once

#include <string>

#include "base/error.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::nccl {

// Which call it was: "ncclGroupEnd", "reduce_scatter of 'layer.3' (#17)", by which rank of the job.
struct Call {
  const char *function;
  const std::string &what;
  uint32_t world_rank;
};

// comm: NULL where there is none yet.
Error error_of(const Library &library, Comm *comm, Result result, const Call &call);

}  // namespace fsdp::transport::nccl
