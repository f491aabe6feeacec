// SPDX-License-Identifier: Apache-2.0
#include "quantized.h"

#include <cmath>

#include "element.h"

namespace harness {
namespace {

// Where the scale of an element is: blocks of 128 x 128 of each matrix.
struct ScaleIndex {
  explicit ScaleIndex(const std::vector<uint64_t> &shape)
      : rows(shape[shape.size() - 2]), columns(shape.back()), across((columns + 127) / 128), down((rows + 127) / 128) {}
  uint64_t operator()(uint64_t element) const {
    const uint64_t row = element / columns, matrix = row / rows;
    return (matrix * down + row % rows / 128) * across + element % columns / 128;
  }
  uint64_t rows, columns, across, down;
};

// 448 / amax: the quotient of two fp32 numbers is exact enough in double to be rounded once more.
float factor_of(double amax, fsdp_scale_rounding rounding) {
  if (amax == 0 || !std::isfinite(amax)) return 1;
  const double quotient = 448 / amax;
  const float factor = quotient < 0x1.ffffffp127 ? static_cast<float>(quotient) : 0x1.fffffep127f;
  return rounding == FSDP_SCALE_POWER_OF_TWO ? std::ldexp(1.0f, std::ilogb(factor)) : factor;
}

}  // namespace

Blocks quantize_blocks(const std::vector<float> &values, const std::vector<uint64_t> &shape,
                       fsdp_scale_rounding rounding, fsdp_dtype from) {
  const ScaleIndex scale_of(shape);
  std::vector<double> amaxes;
  const auto number = [&](uint64_t i) { return round_to(values[i], from ? from : FSDP_FLOAT32); };
  for (uint64_t i = 0; i < values.size(); ++i) {
    const uint64_t block = scale_of(i);
    if (block >= amaxes.size()) amaxes.resize(block + 1);
    const double magnitude = std::fabs(static_cast<double>(number(i)));
    if (!(magnitude <= amaxes[block])) amaxes[block] = std::isnan(magnitude) ? HUGE_VAL : magnitude;
  }
  Blocks blocks;
  std::vector<float> factors;
  for (const double amax : amaxes) {
    factors.push_back(factor_of(amax, rounding));
    blocks.scales.push_back(static_cast<float>(1 / static_cast<double>(factors.back())));
  }
  for (uint64_t i = 0; i < values.size(); ++i) {
    uint8_t code = 0;
    const double product = static_cast<double>(number(i)) * static_cast<double>(factors[scale_of(i)]);
    store_element(&code, FSDP_FLOAT8_E4M3, 0, static_cast<float>(product));
    blocks.codes.push_back(code);
  }
  return blocks;
}

std::vector<float> dequantize(const Blocks &blocks, const std::vector<uint64_t> &shape) {
  const ScaleIndex scale_of(shape);
  std::vector<float> values(blocks.codes.size());
  for (uint64_t i = 0; i < values.size(); ++i)
    values[i] = load_element(blocks.codes.data(), FSDP_FLOAT8_E4M3, i) * blocks.scales[scale_of(i)];
  return values;
}

std::vector<uint64_t> scale_shape(std::vector<uint64_t> shape) {
  for (size_t d = shape.size() - 2; d < shape.size(); ++d) shape[d] = (shape[d] + 127) / 128;
  return shape;
}

}  // namespace harness
