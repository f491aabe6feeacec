// SPDX-License-Identifier: Apache-2.0
// Quantized weights from the words of the header alone, in double: what the library's planes are compared with.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp.h"

namespace harness {

// One form of the planes: codes of the numbers, and what they are multiplied by.
struct Blocks {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  bool operator==(const Blocks &) const = default;
};

// The matrix is that of the last two dimensions; scales in C order, too.
// whole: one scale for all, whatever the shape.
Blocks quantize_blocks(const std::vector<float> &values, const std::vector<uint64_t> &shape,
                       fsdp_scale_rounding rounding, fsdp_dtype from, bool whole = false);
// MXFP8: blocks of 32 in a row, or in a column. Scales are numbers here, too.
Blocks quantize_mxfp8(const std::vector<float> &values, const std::vector<uint64_t> &shape, bool columns,
                      fsdp_scale_rule rule, fsdp_dtype from);
// Rows x columns of a block; 0 x 0: all of it.
struct BlockShape {
  uint64_t rows, columns;
};
BlockShape block_of(fsdp_quantization quantization, bool columns);
std::vector<float> dequantize(const Blocks &blocks, const std::vector<uint64_t> &shape, BlockShape block);
std::vector<uint64_t> scale_shape(std::vector<uint64_t> shape, BlockShape block);

}  // namespace harness
