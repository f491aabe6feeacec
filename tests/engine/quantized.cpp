// SPDX-License-Identifier: Apache-2.0
#include "quantized.h"

#include <algorithm>
#include <cmath>

#include "element.h"

namespace harness {
namespace {

// Where the scale of an element is: blocks of each matrix, in C order.
struct ScaleIndex {
  ScaleIndex(const std::vector<uint64_t> &shape, BlockShape of)
      : block(of),
        rows(of.rows ? shape[shape.size() - 2] : 1),
        columns(of.rows ? shape.back() : 1),
        across(of.rows ? (columns + of.columns - 1) / of.columns : 1),
        down(of.rows ? (rows + of.rows - 1) / of.rows : 1) {}
  uint64_t operator()(uint64_t element) const {
    if (!block.rows) return 0;
    const uint64_t row = element / columns, matrix = row / rows;
    return (matrix * down + row % rows / block.rows) * across + element % columns / block.columns;
  }
  BlockShape block;
  uint64_t rows, columns, across, down;
};

// The largest magnitude of each block; NaN if the block has a NaN.
std::vector<double> find_amaxes(const std::vector<float> &numbers, const ScaleIndex &scale_of) {
  std::vector<double> amaxes;
  for (uint64_t i = 0; i < numbers.size(); ++i) {
    const uint64_t block = scale_of(i);
    if (block >= amaxes.size()) amaxes.resize(block + 1);
    const double magnitude = std::fabs(static_cast<double>(numbers[i]));
    if (std::isnan(magnitude) || magnitude > amaxes[block]) amaxes[block] = magnitude;
  }
  return amaxes;
}

std::vector<float> rounded(const std::vector<float> &values, fsdp_dtype from) {
  std::vector<float> numbers;
  for (const float value : values) numbers.push_back(round_to(value, from ? from : FSDP_FLOAT32));
  return numbers;
}

// The exponent of an E8M0 code.
int mxfp8_exponent(double amax, fsdp_scale_rule rule) {
  if (amax == 0) return -127;
  if (rule == FSDP_SCALE_FLOOR) return std::max(std::ilogb(amax) - 8, -127);
  // Exact in double, rounded to fp32 once.
  const auto v = static_cast<double>(static_cast<float>(amax * static_cast<double>(0x1.24924ap-9f)));
  int exponent = -127;
  while (exponent < 127 && std::ldexp(1.0, exponent) < v) ++exponent;
  return exponent;
}

// 448 / amax: the quotient of two fp32 numbers is exact enough in double to be rounded once more.
float factor_of(double amax, fsdp_scale_rounding rounding) {
  if (amax == 0 || !std::isfinite(amax)) return 1;
  const double quotient = 448 / amax;
  const float factor = quotient < 0x1.ffffffp127 ? static_cast<float>(quotient) : 0x1.fffffep127f;
  return rounding == FSDP_SCALE_POWER_OF_TWO ? std::ldexp(1.0f, std::ilogb(factor)) : factor;
}

}  // namespace

BlockShape block_of(fsdp_quantization quantization, bool columns) {
  if (quantization == FSDP_QUANTIZE_FP8) return {0, 0};
  if (quantization == FSDP_QUANTIZE_FP8_BLOCK) return {128, 128};
  return columns ? BlockShape{32, 1} : BlockShape{1, 32};
}

Blocks quantize_blocks(const std::vector<float> &values, const std::vector<uint64_t> &shape,
                       fsdp_scale_rounding rounding, fsdp_dtype from, bool whole) {
  const ScaleIndex scale_of(shape, block_of(whole ? FSDP_QUANTIZE_FP8 : FSDP_QUANTIZE_FP8_BLOCK, false));
  const std::vector<float> numbers = rounded(values, from);
  Blocks blocks;
  std::vector<float> factors;
  for (const double amax : find_amaxes(numbers, scale_of)) {
    factors.push_back(factor_of(amax, rounding));
    blocks.scales.push_back(static_cast<float>(1 / static_cast<double>(factors.back())));
  }
  for (uint64_t i = 0; i < values.size(); ++i) {
    uint8_t code = 0;
    const double product = static_cast<double>(numbers[i]) * static_cast<double>(factors[scale_of(i)]);
    store_element(&code, FSDP_FLOAT8_E4M3, 0, static_cast<float>(product));
    blocks.codes.push_back(code);
  }
  return blocks;
}

Blocks quantize_mxfp8(const std::vector<float> &values, const std::vector<uint64_t> &shape, bool columns,
                      fsdp_scale_rule rule, fsdp_dtype from) {
  const ScaleIndex scale_of(shape, block_of(FSDP_QUANTIZE_MXFP8, columns));
  const std::vector<float> numbers = rounded(values, from);
  Blocks blocks;
  std::vector<int> exponents;
  for (const double amax : find_amaxes(numbers, scale_of)) {
    const bool spoilt = std::isnan(amax) || (std::isinf(amax) && rule == FSDP_SCALE_FLOOR);
    exponents.push_back(spoilt ? 128 : std::isinf(amax) ? 127 : mxfp8_exponent(amax, rule));
    blocks.scales.push_back(spoilt ? std::nanf("") : std::ldexp(1.0f, exponents.back()));
  }
  for (uint64_t i = 0; i < values.size(); ++i) {
    uint8_t code = 0x7F;
    const int exponent = exponents[scale_of(i)];
    if (exponent != 128) {
      const double quotient = std::ldexp(static_cast<double>(numbers[i]), -exponent);
      store_element(&code, FSDP_FLOAT8_E4M3, 0, static_cast<float>(quotient));
    }
    blocks.codes.push_back(code);
  }
  return blocks;
}

std::vector<float> dequantize(const Blocks &blocks, const std::vector<uint64_t> &shape, BlockShape block) {
  const ScaleIndex scale_of(shape, block);
  std::vector<float> values(blocks.codes.size());
  for (uint64_t i = 0; i < values.size(); ++i)
    values[i] = load_element(blocks.codes.data(), FSDP_FLOAT8_E4M3, i) * blocks.scales[scale_of(i)];
  return values;
}

std::vector<uint64_t> scale_shape(std::vector<uint64_t> shape, BlockShape block) {
  if (!block.rows) return std::vector<uint64_t>(shape.size(), 1);
  shape.back() = (shape.back() + block.columns - 1) / block.columns;
  uint64_t &rows = shape[shape.size() - 2];
  rows = (rows + block.rows - 1) / block.rows;
  return shape;
}

}  // namespace harness
