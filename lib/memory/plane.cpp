// SPDX-License-Identifier: Apache-2.0

#include "memory/plane.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/checked.h"
#include "base/dtype.h"
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

// The number of rows of one granule: the declared number, rounded up to a multiple of `unit`.
uint64_t rows_together(const ParamSpec &param, uint64_t unit) {
  const uint64_t rows = round_up(param.rows(), unit, "rows of a granule");
  switch (param.granule) {
    case FSDP_GRANULE_BLOCK: return std::min(checked_lcm(std::min(param.granule_rows, rows), unit, "a granule"), rows);
    case FSDP_GRANULE_TENSOR: return rows;
    default: return unit;
  }
}

uint64_t count_blocks(uint64_t elements) { return divide_up(elements, coded_block); }

// The number of rows in a granule. A granule cuts no block, neither of the compute weights nor of a state.
uint64_t granule_rows_of(const ParamSpec &param) {
  uint64_t least = 1;
  if (param.coded_states) least = coded_block / std::gcd(coded_block, param.row_size());
  if (!param.quantized() || scales_whole_tensors(param.quantization)) return rows_together(param, least);
  return rows_together(param, checked_lcm(least, block_rows(param), "rows of a granule"));
}

layout::TensorSpec make_tensor(const ParamSpec &param, fsdp_granule granule, uint64_t granule_rows) {
  layout::TensorSpec tensor{param.shape, granule, granule_rows};
  tensor.row_dimensions = param.row_dimensions;
  return tensor;
}

// The number that an element of a box has in the whole tensor.
uint64_t number_in_tensor(const ParamSpec &param, uint64_t element) {
  uint64_t number = 0, size = 1;
  for (size_t d = param.shape.size(); d-- > 0; element /= param.shape[d]) {
    number += (element % param.shape[d] + param.global_offset[d]) * size;
    size *= param.global_shape[d];
  }
  return number;
}

// The number of elements of the parameter, or of the whole tensor if it is a box.
uint64_t whole_count(const ParamSpec &param) {
  return param.is_box() ? product(param.global_shape) : param.element_count;
}

// Does each row of the last dimension consist of whole blocks, in the parameter and in the whole tensor? If so, the
// scales of a state also have rows, and the scales of a box are parts of the rows of the whole tensor's scales.
bool has_scale_rows(const ParamSpec &param) {
  const auto is_whole = [](uint64_t count) { return count % coded_block == 0; };
  if (param.shape.empty() || !is_whole(param.shape.back())) return false;
  return !param.is_box() || (is_whole(param.global_shape.back()) && is_whole(param.global_offset.back()));
}

// If a box is one run of blocks of the whole tensor, returns the number of its first block in the whole tensor. If not,
// returns nothing.
std::optional<uint64_t> find_first_block(const ParamSpec &param) {
  const uint64_t whole_row = product(std::span(param.global_shape).subspan(1));
  if (!std::ranges::equal(std::span(param.shape).subspan(1), std::span(param.global_shape).subspan(1))) return {};
  const uint64_t first = param.global_offset.front() * whole_row, end = first + param.element_count;
  if (first % coded_block || (end % coded_block && end != param.global_shape.front() * whole_row)) return {};
  return first / coded_block;
}

// Checkpoints store the planes of a frozen parameter, so the planes of a box must be a part of the whole tensor's
// planes. If they are not, returns the reason.
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
  if (param.granule == FSDP_GRANULE_TENSOR || param.shape.empty()) return 0;
  const uint64_t declared = param.granule == FSDP_GRANULE_BLOCK ? param.granule_rows : 1;
  const layout::TensorSpec tensor = tensor_of(param);
  if (tensor.granule != FSDP_GRANULE_BLOCK || declared >= param.rows()) return 0;
  return tensor.granule_rows > declared ? tensor.granule_rows : 0;
}

// All forms have the same number of scales per granule, so one layout serves all of them.
layout::TensorSpec tensor_of(const ParamSpec &param) {
  if (!param.quantized() || scales_whole_tensors(param.quantization))
    return param.coded_states ? coded_tensor_of(param) : make_tensor(param, param.granule, param.granule_rows);
  layout::TensorSpec tensor = make_tensor(param, FSDP_GRANULE_BLOCK, granule_rows_of(param));
  tensor.granule_scales = count_scales(param, tensor.granule_rows);
  tensor.scale_count = product(scale_shapes(param).front());
  return tensor;
}

layout::TensorSpec coded_tensor_of(const ParamSpec &param) {
  layout::TensorSpec tensor = make_tensor(param, FSDP_GRANULE_BLOCK, granule_rows_of(param));
  tensor.granule_scales = tensor.granule_rows * param.row_size() / coded_block;
  tensor.scale_count = count_blocks(param.element_count);
  return tensor;
}

bool can_code_states(const ParamSpec &param) {
  if (param.frozen() || whole_count(param) < least_coded_elements) return false;
  return !param.is_box() || has_scale_rows(param) || find_first_block(param).has_value();
}

bool can_code_states_of_all(const ParamSpec &param) {
  if (!can_code_states(param)) return false;
  for (const uint64_t place : {0, 1}) {
    ParamSpec box = param;
    for (size_t d = 0; d < box.global_offset.size(); ++d)
      box.global_offset[d] = std::min(place * box.shape[d], box.global_shape[d] - box.shape[d]);
    if (!can_code_states(box)) return false;
  }
  return true;
}

bool cuts_coded_blocks(const ParamSpec &param) {
  return !param.frozen() && whole_count(param) >= least_coded_elements && !param.coded_states;
}

// The dimensions after `cut` are whole. So elements that differ only in the index of `cut` and in later indices are
// contiguous in the whole tensor: they are a piece. Pieces that differ only in the index before `cut` have equal
// distances: they are a run.
std::vector<ElementRun> list_runs(const ParamSpec &param, uint64_t first, uint64_t count) {
  if (!param.is_box() || param.shape.empty()) return {{0, count, first, std::max<uint64_t>(count, 1), 0}};
  size_t cut = param.shape.size() - 1;
  while (cut > 0 && param.shape[cut] == param.global_shape[cut]) --cut;
  const uint64_t length = product(std::span(param.shape).subspan(cut));
  const uint64_t pitch = product(std::span(param.global_shape).subspan(cut));
  const uint64_t run = cut == 0 ? length : length * param.shape[cut - 1];
  std::vector<ElementRun> runs;
  for (uint64_t done = 0; done < count;) {
    const uint64_t at = first + done, piece = length - at % length;
    // The rest of a piece is a run of its own, so that the next run begins with a whole piece.
    const uint64_t now = std::min(count - done, piece < length ? piece : run - at % run);
    runs.push_back({done, now, number_in_tensor(param, at), length, pitch});
    done += now;
  }
  return runs;
}

bool sums_in_full_grads(const ModelSpec &spec, const GroupSpec &group, fsdp_dtype grad_dtype) {
  return group.reduce_policy == FSDP_REDUCE_POLICY_LAST && grad_dtype == FSDP_FLOAT32 &&
         !(spec.debug && spec.host_memory);
}

bool rounds_randomly(const ModelSpec &spec) {
  return std::ranges::any_of(spec.groups, [](const GroupSpec &group) {
    return std::ranges::any_of(group.params, [&](const ParamSpec &param) {
      return !param.frozen() && main_storage_of(group, param.dtype) == FSDP_MAIN_NONE;
    });
  });
}

std::optional<std::string> find_storage_misfit(const ParamSpec &param, const GroupSpec &group) {
  if (group.main_storage == FSDP_MAIN_FLOAT32 || param.frozen()) return {};
  if (param.by_caller() && main_storage_of(group, param.dtype) == FSDP_MAIN_SPLIT16)
    return format_text(
        "parameter '{}' of group '{}' has FSDP_OPTIMIZER_CALLER: FSDP_MAIN_SPLIT16 is for weights that fsdp_step_adamw "
        "updates; give the group main_storage FSDP_MAIN_FLOAT32, or FSDP_MAIN_NONE and call fsdp_round_stochastic",
        param.name, group.name);
  if (!param.quantized() && param.dtype != FSDP_FLOAT16) return {};
  return format_text(
      "parameter '{}' of group '{}' is {}: {} is for bfloat16 weights that are not quantized; give the group "
      "main_storage FSDP_MAIN_FLOAT32",
      param.name, group.name, param.quantized() ? find_quantization(param.quantization).name : dtype_name(param.dtype),
      group.main_storage == FSDP_MAIN_SPLIT16 ? "FSDP_MAIN_SPLIT16" : "FSDP_MAIN_NONE");
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

// Returns how many rows of the parameter hold whole blocks. Several rows make one block if a row is smaller than a
// matrix.
uint64_t block_rows(const ParamSpec &param) {
  const uint64_t least = find_quantization(param.quantization).granule_rows;
  if (!least) return 0;
  const uint64_t block = checked_multiply(least, param.shape.back(), "elements of a row of blocks");
  return checked_lcm(block, param.row_size(), "elements of a row of blocks") / param.row_size();
}

uint64_t count_scales(const ParamSpec &param, uint64_t rows) {
  const uint64_t columns = param.shape.back();
  const uint64_t matrix_rows = checked_multiply(rows, param.row_size(), "elements of a granule") / columns;
  const BlockSize block = find_quantization(param.quantization).forms.front();
  return checked_multiply(divide_up(matrix_rows, block.rows), divide_up(columns, block.columns), "scales of a granule");
}

namespace {

// If each row consists of whole blocks, the scales have as many dimensions as the parameter. If not, they are one row
// with the scales of all blocks.
StoredShape shape_of_state_scales(const ParamSpec &param) {
  if (has_scale_rows(param)) {
    StoredShape stored{param.shape, param.global_shape, param.global_offset};
    for (std::vector<uint64_t> *sizes : {&stored.shape, &stored.global_shape, &stored.global_offset})
      if (!sizes->empty()) sizes->back() /= coded_block;
    return stored;
  }
  StoredShape stored{{count_blocks(param.element_count)}, {}, {}};
  if (!param.is_box()) return stored;
  stored.global_shape = {count_blocks(product(param.global_shape))};
  stored.global_offset = {find_first_block(param).value()};
  return stored;
}

}  // namespace

StoredShape stored_shape(const ParamSpec &param, const PlanePlan &plane) {
  if (plane.kind == PlaneKind::state_scales) return shape_of_state_scales(param);
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
    return format_text("{} needs matrices of a multiple of {} rows{}, but shape[{}] is {}{}", which, least,
                       kind.edges ? " where there are several" : "", dimensions - 2, rows,
                       kind.edges ? "; pad the matrices, or declare each one as a parameter" : "; pad the matrices");
  if (!kind.edges && param.shape.back() % least)
    return format_text("{} needs matrices of a multiple of {} columns, but shape[{}] is {}", which, least,
                       dimensions - 1, param.shape.back());
  if (const uint64_t unit = block_rows(param); param.granule == FSDP_GRANULE_BLOCK && param.granule_rows % unit)
    return format_text("{} needs granules of a multiple of {} rows{}, but granule_rows is {}", which, unit,
                       param.row_dimensions > 1 ? format_text(" of {} elements", param.row_size()) : "",
                       param.granule_rows);
  return {};
}

std::string stored_name(const ParamSpec &param, const PlanePlan &plane) {
  return format_text("{}.{}", param.name, plane_name(plane));
}

std::string stored_name(const ParamSpec &param, const StateSpec &state) {
  return format_text("state.{}.{}", param.name, state.name);
}

std::string coded_name(const ParamSpec &param, const StateSpec &state, bool scales) {
  return stored_name(param, state) + (scales ? ".absmax" : ".code");
}

}  // namespace fsdp::memory
