// SPDX-License-Identifier: Apache-2.0
// Quantized weights from the words of the header alone, in double: what the library's planes are compared with.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp.h"

namespace harness {

// FP8_BLOCK: codes of the numbers, and what they are multiplied by.
struct Blocks {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  bool operator==(const Blocks &) const = default;
};

// The matrix is that of the last two dimensions; scales in C order, too.
Blocks quantize_blocks(const std::vector<float> &values, const std::vector<uint64_t> &shape,
                       fsdp_scale_rounding rounding, fsdp_dtype from);
std::vector<float> dequantize(const Blocks &blocks, const std::vector<uint64_t> &shape);
std::vector<uint64_t> scale_shape(std::vector<uint64_t> shape);

}  // namespace harness
