// SPDX-License-Identifier: Apache-2.0
// The rules for structs that grow. An older caller's struct may be shorter than ours; the missing bytes count as zero.
// A newer caller's struct may be longer; the bytes that this release does not know must be zero.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/error.h"
#include "engine/context/context.h"
#include "engine/runtime/group.h"
#include "fsdp.h"
#include "memory/model_spec.h"

// The name of a value in errors: "retain_secs", or "params[3] ('wq').dtype" for a field of an array's element.

namespace fsdp::abi {

// The text is made only if an error needs it. Making ten texts for each of a model's thousands of parameters would take
// longer than reading the parameters.
class Field {
 public:
  Field(const char *name) : name_(name) {}
  // `element` is the element's own name, if it is known. `name` is the field's name, or nullptr for the whole element.
  Field(const char *array, uint64_t index, const std::string *element, const char *name)
      : name_(name), array_(array), index_(index), element_(element) {}

  std::string text() const;

 private:
  const char *name_, *array_ = nullptr;
  uint64_t index_ = 0;
  const std::string *element_ = nullptr;
};

}  // namespace fsdp::abi

template <>
struct fmt::formatter<fsdp::abi::Field> : fmt::formatter<std::string> {
  template <class Context>
  auto format(const fsdp::abi::Field &field, Context &context) const {
    return fmt::formatter<std::string>::format(field.text(), context);
  }
};

namespace fsdp::abi {

// The size of each struct in the first release of this ABI, 0.2, with which an older client may be built. It never
// changes. If a struct grows, a line here gets the offset of the first field that was added.
template <class T>
inline constexpr uint64_t first_size = sizeof(T);
template <>
inline constexpr uint64_t first_size<fsdp_error> = 40;  // a struct of this size may cut the message
template <>
inline constexpr uint64_t first_size<fsdp_model_options> = offsetof(fsdp_model_options, max_pending_bytes);
template <>
inline constexpr uint64_t first_size<fsdp_stats> = offsetof(fsdp_stats, home_read_bytes);
template <>
inline constexpr uint64_t first_size<fsdp_group_options> = offsetof(fsdp_group_options, main_storage);
template <>
inline constexpr uint64_t first_size<fsdp_param> = offsetof(fsdp_param, row_dimensions);
template <>
inline constexpr uint64_t first_size<fsdp_visit> = offsetof(fsdp_visit, piece);
template <>
inline constexpr uint64_t first_size<fsdp_group_info> = offsetof(fsdp_group_info, main_storage);
template <>
inline constexpr uint64_t first_size<fsdp_loaded> = offsetof(fsdp_loaded, loaded_tensors);

// A caller has certainly not set a larger struct_size, so the bytes after the struct must not be read.
constexpr uint64_t max_size = 4096;

template <class T>
T read_options(const T *given, const char *call, const Field &name) {
  T options{};
  options.struct_size = sizeof(T);
  if (!given) return options;
  const uint64_t size = given->struct_size;
  if (size < first_size<T>)
    fail(FSDP_INVALID_ARGUMENT, "{}: {}.struct_size is {}, at least {} is needed; set it to sizeof({})", call, name,
         size, first_size<T>, name);
  if (size > max_size)
    fail(FSDP_INVALID_ARGUMENT, "{}: {}.struct_size is {}, more than any release has; set it to sizeof({})", call, name,
         size, name);
  const auto *bytes = reinterpret_cast<const unsigned char *>(given);
  for (uint64_t i = sizeof(T); i < size; ++i)
    if (bytes[i])
      fail(FSDP_UNSUPPORTED,
           "{}: byte {} of {} is {:#x}, but this release knows only the first {} bytes; it must be zero", call, i, name,
           bytes[i], sizeof(T));
  std::memcpy(&options, given, std::min<uint64_t>(size, sizeof(T)));
  options.struct_size = sizeof(T);
  return options;
}

template <class T>
void check_output(const T *out, const char *call, const char *name) {
  if (!out) fail(FSDP_INVALID_ARGUMENT, "{}: the {} is NULL", call, name);
  if (out->struct_size < first_size<T>)
    fail(FSDP_INVALID_ARGUMENT, "{}: {}.struct_size is {}, at least {} is needed; set it to sizeof({}) before the call",
         call, name, out->struct_size, first_size<T>, name);
}

// Writes an element of a caller's array of outputs. The library, and not the caller, sets the element's struct_size.
template <class T>
void write_element(T *first, uint64_t index, uint64_t stride, T value) {
  value.struct_size = std::min<uint64_t>(stride, sizeof(T));
  std::memcpy(reinterpret_cast<char *>(first) + index * stride, &value, value.struct_size);
}

// Writes as many bytes as fit into the caller's struct, whose struct_size does not change.
template <class T>
void write_output(T *out, T value) {
  value.struct_size = out->struct_size;
  std::memcpy(static_cast<void *>(out), &value, std::min<uint64_t>(out->struct_size, sizeof(T)));
}

// Checks the stride of an array of structs, even if the array is empty.
template <class T>
void check_stride(uint64_t stride, const char *call, const char *field, const char *name) {
  if (stride < first_size<T> || stride > max_size || stride % alignof(T))
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}; pass sizeof({}), which is {} here", call, field, stride, name,
         sizeof(T));
}

// A caller's array of structs without a struct_size: bytes that this release does not know must be zero.
template <class T>
Strided<T> read_array(const T *first, uint64_t count, uint64_t stride, const char *call, const char *field,
                      const char *name) {
  check_stride<T>(stride, call, format_text("{}_stride", field).c_str(), name);
  if (count && !first) fail(FSDP_INVALID_ARGUMENT, "{}: {}s is NULL, {}_count is {}", call, field, field, count);
  return {first, count, stride};
}

template <class T>
void check_known(const Strided<T> &array, uint64_t index, const char *call, const char *field) {
  if (const auto byte = array.unknown_byte(index))
    fail(FSDP_UNSUPPORTED, "{}: byte {} of {}s[{}] is not zero, but this release knows only the first {} bytes", call,
         *byte, field, index, sizeof(T));
}

// Writes a text into a caller's buffer, as fsdp_describe_model documents it.
void write_text(const std::string &text, char *buffer, uint64_t *size_bytes, const char *call);

// Reads a name, which must be UTF-8 of 1 to `most` bytes.
std::string read_name(const char *name, size_t most, const char *call, const Field &field);

// Divides main weights and states among the replicas of a mesh, if the strategy says so.
void set_outer_strategy(fsdp_outer_strategy strategy, layout::Mesh &mesh, const char *call, const Field &field);
// Returns the factor that applies to an fsdp_grad_op; 1 if the operation has none.
double read_grad_factor(fsdp_grad_op op, double factor, const char *call, const Field &field);

// Checks a number for fp32 arithmetic: it must be finite in fp32.
inline void check_factor(double value, const char *call, const Field &field) {
  if (!std::isfinite(value) || std::abs(value) > static_cast<double>(std::numeric_limits<float>::max()))
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be finite in fp32", call, field, value);
}

// Checks the factor of the learning rate, which must be 0 or more.
inline void check_lr_scale(double lr_scale, const char *call, const Field &field) {
  check_factor(lr_scale, call, field);
  if (lr_scale < 0) fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must not be negative", call, field, lr_scale);
}

// Reads an enum field: 0 means the default; any other value must be in [1, last].
template <class E>
E read_enum(E value, E fallback, E last, const char *call, const Field &field) {
  if (value == 0) return fallback;
  if (value < 1 || value > last)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be 0 (default) or in [1, {}]", call, field, value, last);
  return value;
}

inline void check_flags(uint32_t flags, uint32_t known, const char *call, const Field &field) {
  if (flags & ~known) fail(FSDP_INVALID_ARGUMENT, "{}: {} has unknown bits {:#x}", call, field, flags & ~known);
}

// Reads a double for which 0 means the default, unless the flag says that 0 is meant.
inline double read_value(double value, double fallback, bool zero, const char *flag, const char *call,
                         const Field &field) {
  if (zero && value != 0) fail(FSDP_INVALID_ARGUMENT, "{}: {} contradicts {} {}", call, flag, field, value);
  return zero ? 0.0 : value != 0 ? value : fallback;
}

constexpr uint64_t max_steps = uint64_t{1} << 53;  // a double counts exactly up to this number

inline void check_phase(fsdp_phase phase, const char *call) {
  if (phase < FSDP_FORWARD || phase > FSDP_EVAL)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is not a phase (FSDP_FORWARD .. FSDP_EVAL)", call, phase);
}

// Views of the library's memory, as callers get them.

// `shape` must exist as long as the view may be used.
inline fsdp_tensor view_of(engine::Context &context, void *data, std::span<const uint64_t> shape, fsdp_dtype dtype,
                           uint32_t flags) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  view.data = data;
  view.shape = shape.data();
  view.element_count = std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>());
  view.dimension_count = static_cast<uint32_t>(shape.size());
  view.dtype = dtype;
  view.element_size = static_cast<uint32_t>(dtype_size(dtype));
  view.flags = flags;
  view.device = context.device_kind();
  view.device_index = std::max(0, context.device().index());
  return view;
}

// Checks a caller's array of views, one for each parameter of a group.
inline void check_tensors(const engine::Group &group, const fsdp_tensor *tensors, uint64_t count, uint64_t stride,
                          const char *field, const char *call) {
  check_stride<fsdp_tensor>(stride, call, format_text("{}_stride", field).c_str(), "fsdp_tensor");
  if (count != group.places.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: {}_count is {}, group '{}' has {} parameters", call, field, count, group.name(),
         group.places.size());
  if (count && !tensors) fail(FSDP_INVALID_ARGUMENT, "{}: {}s is NULL, {}_count is {}", call, field, field, count);
}

// Reads and checks each descriptor of a caller's array. An error names the element and the field.
std::vector<memory::ParamSpec> read_params(const fsdp_param *params, uint64_t count, uint64_t stride, const char *call);

}  // namespace fsdp::abi
