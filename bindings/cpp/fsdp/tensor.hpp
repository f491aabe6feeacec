// SPDX-License-Identifier: Apache-2.0
// Views of the library's memory. Included by fsdp.hpp.
#ifndef FSDP_TENSOR_HPP
#define FSDP_TENSOR_HPP

#include <fsdp.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "error.hpp"

namespace fsdp {

enum class DType : fsdp_dtype {
  float32 = FSDP_FLOAT32,
  bfloat16 = FSDP_BFLOAT16,
  float16 = FSDP_FLOAT16,
  float8_e4m3 = FSDP_FLOAT8_E4M3,
  e8m0 = FSDP_E8M0,
  uint8 = FSDP_UINT8
};
enum class DeviceKind : fsdp_device_kind { host = FSDP_DEVICE_HOST, cuda = FSDP_DEVICE_CUDA };

/** A bfloat16 and an IEEE half as their bits. */
struct bfloat16 {
  std::uint16_t bits;
};
struct float16 {
  std::uint16_t bits;
};
/** The codes of quantized weights, and their scales 2^(bits - 127) where these are powers of two. */
struct float8_e4m3 {
  std::uint8_t bits;
};
struct e8m0 {
  std::uint8_t bits;
};

/** The dtype of a C++ type; specialize it for one of your own that has such bits. */
template <typename T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::float32;
};
template <>
struct dtype_of<bfloat16> {
  static constexpr DType value = DType::bfloat16;
};
template <>
struct dtype_of<float16> {
  static constexpr DType value = DType::float16;
};
template <>
struct dtype_of<e8m0> {
  static constexpr DType value = DType::e8m0;
};
template <>
struct dtype_of<float8_e4m3> {
  static constexpr DType value = DType::float8_e4m3;
};
template <>
struct dtype_of<std::uint8_t> {
  static constexpr DType value = DType::uint8;
};
template <typename T>
inline constexpr fsdp_dtype raw_dtype = static_cast<fsdp_dtype>(dtype_of<std::remove_cv_t<T>>::value);

inline std::uint64_t get_dtype_size(DType dtype) { return fsdp_get_dtype_size(static_cast<fsdp_dtype>(dtype)); }

/** Consecutive elements in memory that it does not own: a std::span for C++17, and convertible to std::span. */
template <typename T>
class span {
 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  constexpr span() = default;
  constexpr span(T *data, std::size_t size) : data_(data), size_(size) {}
  template <typename Other, typename = std::enable_if_t<std::is_convertible_v<Other (*)[], T (*)[]>>>
  constexpr span(span<Other> other) : data_(other.data()), size_(other.size()) {}

  constexpr T *data() const noexcept { return data_; }
  constexpr std::size_t size() const noexcept { return size_; }
  constexpr bool empty() const noexcept { return size_ == 0; }
  constexpr T *begin() const noexcept { return data_; }
  constexpr T *end() const noexcept { return data_ + size_; }
  constexpr T &operator[](std::size_t index) const { return data_[index]; }

 private:
  T *data_ = nullptr;
  std::size_t size_ = 0;
};

/** Memory that libfsdp owns: a typed span of it by `fsdp::span<const float> w = tensor` or tensor.as<float>(). */
class Tensor {
 public:
  Tensor() : raw_(detail::sized<fsdp_tensor>()) {}
  explicit Tensor(const fsdp_tensor &raw) : raw_(raw) {}

  /** Throws if T is another type, if T may write what is read-only, or if the memory is a GPU's. */
  template <typename T>
  span<T> as() const {
    if (raw_.dtype != raw_dtype<T> || raw_.device != FSDP_DEVICE_HOST || !raw_.data ||
        (!std::is_const_v<T> && is_read_only()))
      refuse_as(raw_dtype<T>);
    return {static_cast<T *>(raw_.data), static_cast<std::size_t>(raw_.element_count)};
  }
  template <typename T>
  operator span<T>() const {
    return as<T>();
  }

  void *data() const noexcept { return raw_.data; }
  explicit operator bool() const noexcept { return raw_.data != nullptr; }
  span<const std::uint64_t> shape() const noexcept { return {raw_.shape, raw_.dimension_count}; }
  std::uint64_t element_count() const noexcept { return raw_.element_count; }
  DType dtype() const noexcept { return static_cast<DType>(raw_.dtype); }
  DeviceKind device() const noexcept { return static_cast<DeviceKind>(raw_.device); }
  int device_index() const noexcept { return raw_.device_index; }
  bool is_read_only() const noexcept { return (raw_.flags & FSDP_TENSOR_READ_ONLY) != 0; }
  const fsdp_tensor &raw() const noexcept { return raw_; }

 private:
  [[noreturn]] void refuse_as(fsdp_dtype wanted) const {
    if (!raw_.data)
      detail::refuse(FSDP_INVALID_STATE,
                     "there is no such tensor (a gradient of a frozen parameter? weights of a quantized one?)");
    if (raw_.device != FSDP_DEVICE_HOST)
      detail::refuse(FSDP_UNSUPPORTED, "memory of a GPU is no span: data() gives its address");
    if (raw_.dtype == wanted) detail::refuse(FSDP_INVALID_ARGUMENT, "the tensor is read-only: ask for a const type");
    detail::refuse(FSDP_INVALID_ARGUMENT, "the tensor is of dtype " + std::to_string(raw_.dtype) + ", and " +
                                              std::to_string(wanted) + " was asked for");
  }

  fsdp_tensor raw_;
};

}  // namespace fsdp

#endif
