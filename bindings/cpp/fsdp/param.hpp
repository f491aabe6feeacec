// SPDX-License-Identifier: Apache-2.0
// A parameter of a group: its declaration, and what names it. Included by fsdp.hpp.
#ifndef FSDP_PARAM_HPP
#define FSDP_PARAM_HPP

#include <fsdp.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "options.hpp"
#include "tensor.hpp"

namespace fsdp {

/** A parameter to be declared. It has the fields of fsdp_param, but owns its name and shapes. */
struct Param : Options<fsdp_param> {
  Param(std::string name_, std::vector<std::uint64_t> shape_, DType dtype_ = DType::float32, std::uint32_t flags_ = 0)
      : own_name(std::move(name_)), own_shape(std::move(shape_)) {
    dtype = static_cast<fsdp_dtype>(dtype_);
    flags = flags_;
  }
  /** Sets how its compute weights are stored. */
  Param &quantize(Quantization to) {
    quantization = static_cast<fsdp_quantization>(to);
    return *this;
  }
  /** Sets what a step does to it if no rank has given it a gradient. */
  Param &without_grad(MissingGrad what) {
    missing_grad = static_cast<fsdp_missing_grad>(what);
    return *this;
  }
  /** Names the optimizer that updates it. In a model with AdamW, Optimizer::caller leaves it to the caller, in the
   * update window; it then has none of AdamW's states. */
  Param &updated_by(Optimizer which) {
    optimizer = static_cast<fsdp_optimizer>(which);
    return *this;
  }
  /** Puts it into a piece of its group, which can be gathered by itself. The first parameter is in piece 0, and each
   * next one in the same piece or in the next one. */
  Param &in_piece(std::uint32_t number) {
    piece = number;
    return *this;
  }
  /** Lets ranks divide it in this number of leading dimensions: 2 divides the matrices of a stack [E, R, C]. */
  Param &rows_in(std::uint32_t dimensions) {
    row_dimensions = dimensions;
    return *this;
  }
  /** Declares the matrices of its last two dimensions, which Model::collect_matrices brings whole to one rank each.
   * splits: the rows of each matrix into which these dimensions are cut, for example those of q, k and v. */
  Param &with_matrices(std::vector<std::uint64_t> splits = {}) {
    matrix = FSDP_MATRIX_LAST_TWO;
    own_splits = std::move(splits);
    return *this;
  }
  /** Declares it as a box of a larger tensor, by the shape of that tensor and the offset of the box. */
  Param &global(std::vector<std::uint64_t> shape_, std::vector<std::uint64_t> offset_) {
    if (shape_.size() != own_shape.size() || offset_.size() != own_shape.size())
      detail::refuse(FSDP_INVALID_ARGUMENT, own_name + ": global needs a size and an offset for each dimension");
    own_global_shape = std::move(shape_);
    own_global_offset = std::move(offset_);
    return *this;
  }
  /** The descriptor, which points into this. */
  fsdp_param raw() const {
    fsdp_param raw = *this;
    raw.name = own_name.c_str();
    raw.shape = own_shape.data();
    raw.dimension_count = static_cast<std::uint32_t>(own_shape.size());
    if (!own_splits.empty()) {
      raw.matrix_splits = own_splits.data();
      raw.matrix_split_count = own_splits.size();
    }
    raw.global_shape = own_global_shape.empty() ? nullptr : own_global_shape.data();
    raw.global_offset = own_global_offset.empty() ? nullptr : own_global_offset.data();
    return raw;
  }

  std::string own_name;
  std::vector<std::uint64_t> own_shape, own_global_shape, own_global_offset, own_splits;
};

/** Names a parameter of a group by its number in the order of declaration, or by its name. */
class ParamKey {
 public:
  template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
  ParamKey(Integer index) : index_(static_cast<std::uint64_t>(index)) {}
  ParamKey(const char *name) : name_(name), is_name_(true) {}
  ParamKey(std::string_view name) : name_(name), is_name_(true) {}
  ParamKey(const std::string &name) : name_(name), is_name_(true) {}

  bool is_name() const noexcept { return is_name_; }
  std::uint64_t index() const noexcept { return index_; }
  std::string_view name() const noexcept { return name_; }

 private:
  std::uint64_t index_ = 0;
  std::string_view name_;
  bool is_name_ = false;
};

}  // namespace fsdp

#endif
