// SPDX-License-Identifier: Apache-2.0
// Reads the descriptors of parameters that the caller declares. An error names the descriptor and the field.
#include <algorithm>

#include "abi/boundary.h"
#include "abi/options.h"
#include "base/checked.h"
#include "base/dtype.h"

namespace fsdp::abi {
namespace {

constexpr uint32_t max_dimensions = 16;

// Names a field of one descriptor: "params[3] ('wq').granule".
Field field_of(uint64_t index, const memory::ParamSpec &param, const char *field) {
  return {"params", index, &param.name, field};
}

void read_shape(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  if (given.dimension_count > max_dimensions)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, at most {} are allowed", call, field_of(index, param, "dimension_count"),
         given.dimension_count, max_dimensions);
  if (given.dimension_count && !given.shape)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is NULL", call, field_of(index, param, "shape"));
  for (uint32_t d = 0; d < given.dimension_count; ++d) {
    if (given.shape[d] == 0) fail(FSDP_INVALID_ARGUMENT, "{}: {}[{}] is 0", call, field_of(index, param, "shape"), d);
    param.element_count = checked_multiply(param.element_count, given.shape[d], field_of(index, param, "shape"));
    param.shape.push_back(given.shape[d]);
  }
}

// A scalar is one row, with a declared value of 0 or 1.
void read_rows(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  if (given.row_dimensions > std::max(given.dimension_count, 1u))
    fail(FSDP_INVALID_ARGUMENT,
         "{}: {} is {}, but must be at most {}, the parameter's number of dimensions (1 for a "
         "scalar)",
         call, field_of(index, param, "row_dimensions"), given.row_dimensions, std::max(given.dimension_count, 1u));
  param.row_dimensions = std::max(given.row_dimensions, 1u);
}

// Reads a box. Its tensor must be countable in 64 bits, and the box must lie inside the tensor.
void read_box(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  const auto field = [&](const char *name) { return field_of(index, param, name); };
  if (!given.global_shape && !given.global_offset) return;
  if (!given.global_shape || !given.global_offset)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is NULL, but {} is given; a box needs both", call,
         field(given.global_shape ? "global_offset" : "global_shape"),
         given.global_shape ? "global_shape" : "global_offset");
  uint64_t count = 1;
  for (uint32_t d = 0; d < given.dimension_count; ++d) {
    const uint64_t size = given.global_shape[d], first = given.global_offset[d];
    if (first > size || param.shape[d] > size - first)
      fail(FSDP_INVALID_ARGUMENT,
           "{}: {}[{}] is {}, which the box exceeds: its shape[{}] is {} and its global_offset[{}] {}", call,
           field("global_shape"), d, size, d, param.shape[d], d, first);
    count = checked_multiply(count, size, field("global_shape"));
  }
  param.global_shape.assign(given.global_shape, given.global_shape + given.dimension_count);
  param.global_offset.assign(given.global_offset, given.global_offset + given.dimension_count);
}

void read_quantization(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  if (given.quantization < 0 || given.quantization > FSDP_QUANTIZE_FP8_BLOCK)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: {} is {}, it must be 0 (none), FSDP_QUANTIZE_FP8 ({}), FSDP_QUANTIZE_MXFP8 ({}) or "
         "FSDP_QUANTIZE_FP8_BLOCK ({})",
         call, field_of(index, param, "quantization"), given.quantization, FSDP_QUANTIZE_FP8 + 0,
         FSDP_QUANTIZE_MXFP8 + 0, FSDP_QUANTIZE_FP8_BLOCK + 0);
  param.quantization = given.quantization;
}

void read_missing_grad(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  param.missing_grad = read_enum(given.missing_grad, FSDP_MISSING_GRAD_ZEROS + 0, FSDP_MISSING_GRAD_SKIP + 0, call,
                                 field_of(index, param, "missing_grad"));
}

void read_optimizer(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  const Field field = field_of(index, param, "optimizer");
  param.optimizer = read_enum(given.optimizer, 0, FSDP_OPTIMIZER_CALLER + 0, call, field);
  if (param.frozen() && param.optimizer)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but no optimizer updates a parameter with FSDP_PARAM_FROZEN; give it 0",
         call, field, param.optimizer);
}

// Reads the rows of each matrix.
void read_matrices(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  const auto field = [&](const char *name) { return field_of(index, param, name); };
  if (given.matrix < 0 || given.matrix > FSDP_MATRIX_LAST_TWO)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be 0 (none) or FSDP_MATRIX_LAST_TWO ({})", call, field("matrix"),
         given.matrix, FSDP_MATRIX_LAST_TWO + 0);
  if (!given.matrix_splits != !given.matrix_split_count || (given.matrix_splits && !given.matrix))
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but {}", call, field("matrix_split_count"), given.matrix_split_count,
         given.matrix ? (given.matrix_splits ? "there are matrix_splits" : "matrix_splits is NULL")
                      : "the parameter has no matrices (matrix is 0)");
  if (!given.matrix) return;
  if (param.shape.size() < 2 || param.frozen())
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is FSDP_MATRIX_LAST_TWO, but the parameter {}", call, field("matrix"),
         param.frozen() ? "is FROZEN" : format_text("has {} dimensions", param.shape.size()));
  const uint64_t rows = param.shape[param.shape.size() - 2];
  if (given.matrix_split_count > rows)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but a matrix has {} rows, and a split has at least one", call,
         field("matrix_split_count"), given.matrix_split_count, rows);
  param.matrix_splits.assign(given.matrix_splits, given.matrix_splits + given.matrix_split_count);
  if (!given.matrix_splits) param.matrix_splits = {rows};
  uint64_t sum = 0;
  for (uint64_t split = 0; split < param.matrix_splits.size(); ++split) {
    if (param.matrix_splits[split] == 0)
      fail(FSDP_INVALID_ARGUMENT, "{}: {}[{}] is 0", call, field("matrix_splits"), split);
    sum = checked_add(sum, param.matrix_splits[split], field("matrix_splits"));
  }
  if (sum != rows)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} add up to {} rows, but a matrix of the parameter has {}", call,
         field("matrix_splits"), sum, rows);
}

// Checks a parameter of FSDP_UINT8, with whose bytes nothing is computed.
void check_bytes(const memory::ParamSpec &param, uint64_t index, const char *call) {
  if (!param.frozen())
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is FSDP_UINT8 ({}): bytes have no gradient, so it needs FSDP_PARAM_FROZEN",
         call, field_of(index, param, "dtype"), FSDP_UINT8 + 0);
  if (param.quantized())
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but its dtype is FSDP_UINT8, and bytes are not quantized", call,
         field_of(index, param, "quantization"), param.quantization);
}

// Checks that pieces are numbered in the order of the parameters, without a gap.
void check_piece(const memory::ParamSpec &param, std::span<const memory::ParamSpec> before, const char *call) {
  const uint32_t least = before.empty() ? 0 : before.back().piece, most = before.empty() ? 0 : least + 1;
  if (param.piece >= least && param.piece <= most) return;
  const Field field = field_of(before.size(), param, "piece");
  if (before.empty())
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but the first parameter of a group is in piece 0", call, field,
         param.piece);
  fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but after a parameter of piece {} it must be {} or {}", call, field,
       param.piece, least, least, most);
}

memory::ParamSpec read_param(const fsdp_param *at, uint64_t index, const char *call) {
  const fsdp_param given = read_options(at, call, Field("params", index, nullptr, nullptr));
  memory::ParamSpec param;
  param.name = read_name(given.name, 255, call, Field("params", index, nullptr, "name"));
  read_shape(given, index, param, call);
  read_rows(given, index, param, call);
  read_box(given, index, param, call);
  param.dtype = given.dtype == FSDP_UINT8
                    ? FSDP_UINT8 + 0
                    : read_enum(given.dtype, FSDP_FLOAT32 + 0, FSDP_FLOAT16 + 0, call, field_of(index, param, "dtype"));
  check_flags(given.flags, FSDP_PARAM_FROZEN | FSDP_PARAM_NO_DECAY | FSDP_PARAM_LR_ZERO, call,
              field_of(index, param, "flags"));
  param.flags = given.flags;
  param.granule =
      read_enum(given.granule, FSDP_GRANULE_ROW + 0, FSDP_GRANULE_TENSOR + 0, call, field_of(index, param, "granule"));
  if (param.granule == FSDP_GRANULE_BLOCK) {
    if (given.granule_rows == 0)
      fail(FSDP_INVALID_ARGUMENT, "{}: {} is 0, but the granule is FSDP_GRANULE_BLOCK", call,
           field_of(index, param, "granule_rows"));
    param.granule_rows = given.granule_rows;
  }
  check_lr_scale(given.lr_scale, call, field_of(index, param, "lr_scale"));
  param.lr_scale = read_value(given.lr_scale, 1.0, given.flags & FSDP_PARAM_LR_ZERO, "FSDP_PARAM_LR_ZERO", call,
                              field_of(index, param, "lr_scale"));
  param.user_data = given.user_data;
  read_quantization(given, index, param, call);
  read_missing_grad(given, index, param, call);
  read_optimizer(given, index, param, call);
  read_matrices(given, index, param, call);
  param.piece = given.piece;
  if (param.dtype == FSDP_UINT8) check_bytes(param, index, call);
  return param;
}

}  // namespace

std::vector<memory::ParamSpec> read_params(const fsdp_param *params, uint64_t count, uint64_t stride,
                                           const char *call) {
  check_stride<fsdp_param>(stride, call, "param_stride", "fsdp_param");
  if (count && !params) fail(FSDP_INVALID_ARGUMENT, "{}: params is NULL, param_count is {}", call, count);
  std::vector<memory::ParamSpec> specs;
  for (uint64_t i = 0; i < count; ++i) {
    const auto *at = reinterpret_cast<const fsdp_param *>(reinterpret_cast<const char *>(params) + i * stride);
    if (at->struct_size > stride)
      fail(FSDP_INVALID_ARGUMENT, "{}: params[{}].struct_size is {}, but param_stride is {}", call, i, at->struct_size,
           stride);
    memory::ParamSpec param = read_param(at, i, call);
    check_piece(param, specs, call);
    specs.push_back(std::move(param));
  }
  return specs;
}

}  // namespace fsdp::abi
