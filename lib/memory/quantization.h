// SPDX-License-Identifier: Apache-2.0
// What a quantization stores of a parameter, and what it asks of it: the one place that knows the kinds. Pure.
//
//   MXFP8       codes in E4M3 and an E8M0 scale for 32 of them, in two forms: blocks in rows, and in columns. What is
//               multiplied from the left reads one of them, its gradient the other, and neither can be made of the
//               other
//   FP8_BLOCK   codes in E4M3 and an fp32 scale for 128 x 128 of them, one form for all phases
//   FP8         codes in E4M3 and one fp32 scale for all of them, which the ranks that have parts find together
//
// The matrix is that of the last two dimensions, all before them count matrices: a block lies in one matrix.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "memory/model_spec.h"
#include "memory/plane.h"

namespace fsdp::memory {

// What is published of a bucket: kinds, forms and dtypes, without a place.
std::vector<PlanePlan> published_planes(fsdp_dtype dtype, fsdp_quantization quantization);

// Is a parameter of the group stored in two forms?
bool has_forms(const GroupSpec &group);

// Has a parameter one scale for all of its elements? Then these lie as if they were not quantized.
bool scales_whole_tensors(fsdp_quantization quantization);

// How many rows stay together where a ROW granule was asked for, of whose rows a block needs more; 0: as asked.
uint64_t raised_granule(const ParamSpec &param);

// Where a parameter may be cut, and how many scales it has of each whole granule.
layout::TensorSpec tensor_of(const ParamSpec &param);

// By form, in C order; empty for a parameter that has none.
std::vector<std::vector<uint64_t>> scale_shapes(const ParamSpec &param);

// What of a matrix shares a scale of a form; 0 x 0: all of the parameter.
struct BlockSize {
  uint64_t rows, columns;
};
BlockSize block_size(fsdp_quantization quantization, uint32_t form);

// Rows of the first dimension that are quantized by themselves, which rows are loaded in; 0: only all of them are.
uint64_t block_rows(const ParamSpec &param);
// How many scales, of any form, so many rows of the first dimension have: whole blocks.
uint64_t count_scales(const ParamSpec &param, uint64_t rows);

// A stored form of a parameter as a tensor: its shape, and those of a tensor that it is a box of, if it is.
struct StoredShape {
  std::vector<uint64_t> shape, global_shape, global_offset;
};
StoredShape stored_shape(const ParamSpec &param, const PlanePlan &plane);

// Why a parameter cannot be quantized as it was declared, by name and number; nothing if it can.
std::optional<std::string> find_misfit(const ParamSpec &param, const std::string &group);

}  // namespace fsdp::memory
