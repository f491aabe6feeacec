// SPDX-License-Identifier: Apache-2.0
#include "memory/quantization.h"

#include <functional>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"

namespace fsdp::memory {
namespace {

// Rows and columns that share a scale.
constexpr uint64_t block = 128;

uint64_t product(std::span<const uint64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{1}, std::multiplies<>());
}

// Rows of the first dimension that stay together: whole blocks. A matrix among others has whole blocks by itself.
uint64_t granule_rows(const ParamSpec &param) {
  const uint64_t unit = param.shape.size() == 2 ? block : 1;
  switch (param.granule) {
    case FSDP_GRANULE_BLOCK: return param.granule_rows;
    case FSDP_GRANULE_TENSOR: return round_up(param.shape.front(), unit, "rows of a granule");
    default: return unit;
  }
}

}  // namespace

std::vector<PlanePlan> published_planes(fsdp_dtype dtype, fsdp_quantization quantization) {
  if (!quantization) return {{.kind = PlaneKind::compute, .dtype = dtype}};
  return {{.kind = PlaneKind::compute, .dtype = FSDP_FLOAT8_E4M3},
          {.kind = PlaneKind::compute_scales, .dtype = FSDP_FLOAT32}};
}

layout::TensorSpec tensor_of(const ParamSpec &param) {
  layout::TensorSpec tensor{param.shape, param.granule, param.granule_rows};
  if (!param.quantized()) return tensor;
  const std::vector<uint64_t> scales = scale_shape(param);
  tensor.granule = FSDP_GRANULE_BLOCK;
  tensor.granule_rows = granule_rows(param);
  const uint64_t matrix_rows =
      checked_multiply(tensor.granule_rows, product(std::span(param.shape).subspan(1)) / param.shape.back(), "rows");
  tensor.granule_scales = checked_multiply(divide_up(matrix_rows, block), scales.back(), "scales of a granule");
  tensor.scale_count = product(scales);
  return tensor;
}

std::vector<uint64_t> scale_shape(const ParamSpec &param) {
  if (!param.quantized()) return {};
  std::vector<uint64_t> shape = param.shape;
  for (size_t d = shape.size() - 2; d < shape.size(); ++d) shape[d] = divide_up(shape[d], block);
  return shape;
}

std::optional<std::string> find_misfit(const ParamSpec &param, const std::string &group) {
  if (!param.quantized()) return {};
  const std::string which = format_text("parameter '{}' of group '{}': FSDP_QUANTIZE_FP8_BLOCK", param.name, group);
  const size_t dimensions = param.shape.size();
  if (param.frozen())
    return format_text("{} makes its codes of main weights, which an FSDP_PARAM_FROZEN parameter has not", which);
  if (dimensions < 2) return format_text("{} needs a matrix, 2 dimensions or more, but it has {}", which, dimensions);
  if (dimensions > 2 && param.shape[dimensions - 2] % block)
    return format_text("{} needs matrices of a multiple of {} rows where there are several, but shape[{}] is {}", which,
                       block, dimensions - 2, param.shape[dimensions - 2]);
  if (dimensions == 2 && param.granule == FSDP_GRANULE_BLOCK && param.granule_rows % block)
    return format_text("{} needs granules of a multiple of {} rows, but granule_rows is {}", which, block,
                       param.granule_rows);
  return {};
}

}  // namespace fsdp::memory
