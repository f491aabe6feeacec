// SPDX-License-Identifier: Apache-2.0
// Matrices that one rank has whole inside the update window. Included by fsdp.hpp.
#ifndef FSDP_MATRICES_HPP
#define FSDP_MATRICES_HPP

#include <fsdp.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "options.hpp"
#include "tensor.hpp"

namespace fsdp {

/** Some equal matrices of one parameter, which this rank has whole: that of batch_index() and the next ones of a stack.
 *  Their memory may be read and changed in place until the next call of Matrices::next or give_back. */
class Matrix {
 public:
  explicit Matrix(const fsdp_matrix &raw) : raw_(raw) {}

  /** The name of the parameter. */
  std::string name() const { return raw_.name; }
  /** The number of the first matrix in the dimensions before the last two, taken as one. */
  std::uint64_t batch_index() const noexcept { return raw_.batch_index; }
  /** The number of the split, and the first of its rows. */
  std::uint64_t split_index() const noexcept { return raw_.split_index; }
  std::uint64_t row_offset() const noexcept { return raw_.row_offset; }
  std::uint64_t rows() const noexcept { return raw_.rows; }
  std::uint64_t columns() const noexcept { return raw_.columns; }
  /** How many matrices there are. */
  std::uint64_t count() const noexcept { return raw_.count; }
  DType dtype() const noexcept { return static_cast<DType>(raw_.dtype); }
  /** The address of a matrix, 0 to count() - 1: rows x columns numbers in C order. */
  void *data(std::uint64_t number = 0) const noexcept {
    return static_cast<std::byte *>(raw_.data) + number * raw_.stride_bytes;
  }
  /** A matrix as a span of the host's memory. Throws if T is another type, or if there is no such matrix. */
  template <typename T>
  span<T> as(std::uint64_t number = 0) const {
    if (raw_.dtype != raw_dtype<T>)
      detail::refuse(FSDP_INVALID_ARGUMENT, "the matrices of " + name() + " are of dtype " +
                                                std::to_string(raw_.dtype) + ", and " + std::to_string(raw_dtype<T>) +
                                                " was asked for");
    if (number >= raw_.count)
      detail::refuse(FSDP_INVALID_ARGUMENT, "there are " + std::to_string(raw_.count) + " matrices of " + name() +
                                                " here, and number " + std::to_string(number) + " was asked for");
    return {static_cast<T *>(data(number)), static_cast<std::size_t>(raw_.rows * raw_.columns)};
  }
  const fsdp_matrix &raw() const noexcept { return raw_; }

 private:
  fsdp_matrix raw_;
};

/** Matrices on their way, from Model::collect_matrices to give_back(). Its end gives nothing back, because that is a
 *  collective call that is legal only when next() has given all matrices: after an exception, discard the step. */
class Matrices {
 public:
  Matrices(fsdp_model *model, const MatrixOptions &options, fsdp_stream stream) : model_(model), stream_(stream) {
    detail::check(fsdp_collect_matrices(model_, &options, stream_));
  }
  /** The next matrices of this rank; nothing if there are no more. Those of the call before are given back. */
  std::optional<Matrix> next() {
    auto raw = detail::sized<fsdp_matrix>();
    detail::check(fsdp_next_matrix(model_, stream_, &raw));
    if (!raw.data) return std::nullopt;
    return Matrix(raw);
  }
  /** Brings all rows back to the target. */
  void give_back() { detail::check(fsdp_return_matrices(model_, stream_)); }

 private:
  fsdp_model *model_;
  fsdp_stream stream_;
};

}  // namespace fsdp

#endif
