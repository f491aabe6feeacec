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
    case FSDP_FLOAT8_E4M3:
    case FSDP_E8M0:
    case FSDP_UINT8: return 1;
    default: return 0;
  }
}

// True for the dtypes in which callers compute and pass numbers; the others are stored forms and bytes.
constexpr bool is_number(fsdp_dtype dtype) { return dtype >= FSDP_FLOAT32 && dtype <= FSDP_FLOAT16; }

constexpr const char *dtype_name(fsdp_dtype dtype) {
  switch (dtype) {
    case FSDP_FLOAT32: return "float32";
    case FSDP_BFLOAT16: return "bfloat16";
    case FSDP_FLOAT16: return "float16";
    case FSDP_FLOAT8_E4M3: return "float8_e4m3";
    case FSDP_E8M0: return "e8m0";
    case FSDP_UINT8: return "uint8";
    default: return "unknown";
  }
}

constexpr const char *quantization_name(fsdp_quantization quantization) {
  switch (quantization) {
    case FSDP_QUANTIZE_FP8: return "fp8";
    case FSDP_QUANTIZE_MXFP8: return "mxfp8";
    case FSDP_QUANTIZE_FP8_BLOCK: return "fp8_block";
    default: return "none";
  }
}

}  // namespace fsdp
