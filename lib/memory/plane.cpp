// SPDX-License-Identifier: Apache-2.0

#include "memory/plane.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"

namespace fsdp::memory {

namespace {

struct Quantization {
  const char *name;
  uint64_t granule_rows;  // rows of a matrix that stay together, so that no form's block is cut; 0: any number
  bool edges;             // may blocks at the edges be smaller?
  fsdp_dtype scale_dtype;
  std::vector<BlockSize> forms;
};

const Quantization &find_quantization(fsdp_quantization number) {
  static const Quantization fp8{"FSDP_QUANTIZE_FP8", 0, true, FSDP_FLOAT32, {{0, 0}}};
  static const Quantization mxfp8{"FSDP_QUANTIZE_MXFP8", 32, false, FSDP_E8M0, {{1, 32}, {32, 1}}};
  static const Quantization fp8_block{"FSDP_QUANTIZE_FP8_BLOCK", 128, true, FSDP_FLOAT32, {{128, 128}}};
  if (number == FSDP_QUANTIZE_FP8) return fp8;
  return number == FSDP_QUANTIZE_MXFP8 ? mxfp8 : fp8_block;
}

uint64_t product(std::span<const uint64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{1}, std::multiplies<>());
}

// The number of rows of the first dimension that stay together, so that no block is cut. With more than two dimensions
// each row consists of whole matrices, and so of whole blocks.
uint64_t granule_rows(const ParamSpec &param, uint64_t least) {
  const uint64_t unit = param.shape.size() == 2 ? least : 1;
  switch (param.granule) {
    case FSDP_GRANULE_BLOCK: return std::min(param.granule_rows, round_up(param.shape.front(), unit, "rows"));
    case FSDP_GRANULE_TENSOR: return round_up(param.shape.front(), unit, "rows of a granule");
    default: return unit;
  }
}

// Checkpoints store the planes of a frozen parameter, so the planes of a box must be a part of the whole tensor's
// planes. Returns why they are not.
std::optional<std::string> find_cut_block(const ParamSpec &param) {
  if (!param.frozen() || !param.is_box()) return {};
  const Quantization &kind = find_quantization(param.quantization);
  if (param.shape == param.global_shape) return {};  // nothing is cut; find_misfit() checks the rest
  if (!kind.granule_rows)
    return " of an FSDP_PARAM_FROZEN box has a scale of its own, which is no part of the whole tensor's; declare it "
           "without global_shape";
  const size_t dimensions = param.shape.size();
  for (size_t d = dimensions < 2 ? dimensions : dimensions - 2; d < dimensions; ++d) {
    const bool whole_blocks = !kind.edges || (dimensions > 2 && d + 2 == dimensions);
    if (whole_blocks && param.global_shape[d] % kind.granule_rows)
      return format_text(" of an FSDP_PARAM_FROZEN box needs a tensor of multiples of {}, but global_shape[{}] is {}",
                         kind.granule_rows, d, param.global_shape[d]);
    const uint64_t first = param.global_offset[d], end = first + param.shape[d];
    if (first % kind.granule_rows || (end % kind.granule_rows && end != param.global_shape[d]))
      return format_text(
          " of an FSDP_PARAM_FROZEN box needs blocks of {} that the box does not cut, but it is [{}, {}) of "
          "global_shape[{}], which is {}",
          kind.granule_rows, first, end, d, param.global_shape[d]);
  }
  return {};
}

}  // namespace

std::vector<PlanePlan> published_planes(fsdp_dtype dtype, fsdp_quantization quantization) {
  if (!quantization) return {{.kind = PlaneKind::compute, .dtype = dtype}};
  const Quantization &kind = find_quantization(quantization);
  std::vector<PlanePlan> planes;
  for (uint16_t form = 0; form < kind.forms.size(); ++form) {
    planes.push_back({.kind = PlaneKind::compute, .index = form, .dtype = FSDP_FLOAT8_E4M3});
    planes.push_back({.kind = PlaneKind::compute_scales, .index = form, .dtype = kind.scale_dtype});
  }
  return planes;
}

bool has_forms(const GroupSpec &group) {
  return std::ranges::any_of(group.params, [](const ParamSpec &param) {
    return param.quantized() && find_quantization(param.quantization).forms.size() > 1;
  });
}

bool scales_whole_tensors(fsdp_quantization quantization) {
  return quantization && find_quantization(quantization).granule_rows == 0;
}

uint64_t raised_granule(const ParamSpec &param) {
  if (!param.quantized() || scales_whole_tensors(param.quantization) || param.granule != FSDP_GRANULE_ROW) return 0;
  const uint64_t rows = granule_rows(param, find_quantization(param.quantization).granule_rows);
  return rows > 1 ? rows : 0;
}

// All forms have the same number of scales per granule, so one layout serves all of them.
layout::TensorSpec tensor_of(const ParamSpec &param) {
  layout::TensorSpec tensor{param.shape, param.granule, param.granule_rows};
  if (!param.quantized() || scales_whole_tensors(param.quantization)) return tensor;
  const Quantization &kind = find_quantization(param.quantization);
  tensor.granule = FSDP_GRANULE_BLOCK;
  tensor.granule_rows = granule_rows(param, kind.granule_rows);
  tensor.granule_scales = count_scales(param, tensor.granule_rows);
  tensor.scale_count = product(scale_shapes(param).front());
  return tensor;
}

std::vector<std::vector<uint64_t>> scale_shapes(const ParamSpec &param) {
  std::vector<std::vector<uint64_t>> shapes;
  if (!param.quantized()) return shapes;
  if (scales_whole_tensors(param.quantization)) return {std::vector<uint64_t>(param.shape.size(), 1)};
  for (const BlockSize block : find_quantization(param.quantization).forms) {
    std::vector<uint64_t> &shape = shapes.emplace_back(param.shape);
    shape.back() = divide_up(shape.back(), block.columns);
    shape[shape.size() - 2] = divide_up(shape[shape.size() - 2], block.rows);
  }
  return shapes;
}

BlockSize block_size(fsdp_quantization quantization, uint32_t form) {
  return find_quantization(quantization).forms[form];
}

uint64_t block_rows(const ParamSpec &param) {
  const uint64_t least = find_quantization(param.quantization).granule_rows;
  return least && param.shape.size() > 2 ? 1 : least;
}

uint64_t count_scales(const ParamSpec &param, uint64_t rows) {
  const uint64_t columns = param.shape.back();
  const uint64_t matrix_rows =
      checked_multiply(rows, product(std::span(param.shape).subspan(1)) / columns, "rows of a granule");
  const BlockSize block = find_quantization(param.quantization).forms.front();
  return checked_multiply(divide_up(matrix_rows, block.rows), divide_up(columns, block.columns), "scales of a granule");
}

StoredShape stored_shape(const ParamSpec &param, const PlanePlan &plane) {
  if (!is_scales(plane.kind)) return {param.shape, param.global_shape, param.global_offset};
  StoredShape stored{scale_shapes(param)[plane.index], {}, {}};
  if (!param.is_box()) return stored;
  ParamSpec all = param;
  all.shape = param.global_shape;
  stored.global_shape = scale_shapes(all)[plane.index];
  stored.global_offset = param.global_offset;
  if (scales_whole_tensors(param.quantization)) return stored;  // such a box is a whole tensor and starts at 0
  const BlockSize block = block_size(param.quantization, plane.index);
  stored.global_offset.back() /= block.columns;
  stored.global_offset[param.shape.size() - 2] /= block.rows;
  return stored;
}

std::optional<std::string> find_misfit(const ParamSpec &param, const std::string &group) {
  if (!param.quantized()) return {};
  const Quantization &kind = find_quantization(param.quantization);
  const std::string which = format_text("parameter '{}' of group '{}': {}", param.name, group, kind.name);
  const size_t dimensions = param.shape.size();
  if (auto cut = find_cut_block(param)) return which + *cut;
  if (scales_whole_tensors(param.quantization)) return {};
  if (dimensions < 2) return format_text("{} needs a matrix, 2 dimensions or more, but it has {}", which, dimensions);
  const uint64_t rows = param.shape[dimensions - 2], least = kind.granule_rows;
  if ((dimensions > 2 || !kind.edges) && rows % least)
    return format_text("{} needs matrices of a multiple of {} rows{}, but shape[{}] is {}", which, least,
                       kind.edges ? " where there are several" : "", dimensions - 2, rows);
  if (!kind.edges && param.shape.back() % least)
    return format_text("{} needs matrices of a multiple of {} columns, but shape[{}] is {}", which, least,
                       dimensions - 1, param.shape.back());
  if (dimensions == 2 && param.granule == FSDP_GRANULE_BLOCK && param.granule_rows % least)
    return format_text("{} needs granules of a multiple of {} rows, but granule_rows is {}", which, least,
                       param.granule_rows);
  return {};
}

std::string stored_name(const ParamSpec &param, const PlanePlan &plane) {
  return format_text("{}.{}", param.name, plane_name(plane));
}

std::string stored_name(const ParamSpec &param, const StateSpec &state) {
  return format_text("state.{}.{}", param.name, state.name);
}

}  // namespace fsdp::memory
