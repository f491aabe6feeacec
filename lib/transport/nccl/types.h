// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/error.h"
#include "transport/nccl/abi.h"

namespace fsdp::transport::nccl {

inline DataType data_type_of(fsdp_dtype dtype) {
  switch (dtype) {
    case FSDP_FLOAT32: return float32;
    case FSDP_BFLOAT16: return bfloat16;
    case FSDP_FLOAT16: return float16;
    default: fail(FSDP_INTERNAL, "NCCL is to sum values of dtype {}", dtype);
  }
}

}  // namespace fsdp::transport::nccl
