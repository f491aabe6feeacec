// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "fsdp.h"

namespace fsdp {

constexpr size_t dtype_size(fsdp_dtype dtype) {
  switch (dtype) {
    case FSDP_FLOAT32: return 4;
    case FSDP_BFLOAT16:
    case FSDP_FLOAT16: return 2;
    default: return 0;
  }
}

constexpr const char *dtype_name(fsdp_dtype dtype) {
  switch (dtype) {
    case FSDP_FLOAT32: return "float32";
    case FSDP_BFLOAT16: return "bfloat16";
    case FSDP_FLOAT16: return "float16";
    default: return "unknown";
  }
}

}  // namespace fsdp
