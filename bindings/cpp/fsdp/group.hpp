// SPDX-License-Identifier: Apache-2.0
// A parameter group: its values, its weights, its gradients. Included by fsdp.hpp.
#ifndef FSDP_GROUP_HPP
#define FSDP_GROUP_HPP

#include <fsdp.h>

#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "options.hpp"
#include "param.hpp"
#include "tensor.hpp"
#include "weights.hpp"

namespace fsdp {

/** A full gradient to write into, until the reduce. accumulate: add to it; otherwise overwrite all of it. */
struct Grad {
  Tensor tensor;
  bool accumulate = false;
  template <typename T>
  span<T> as() const {
    return tensor.as<T>();
  }
  template <typename T>
  operator span<T>() const {
    return tensor.as<T>();
  }
};

/** A group of a model; copies name the same group. Arrays may have any type with data() and size(): std::vector,
 * std::array, a span. */
class Group {
 public:
  Group() = default;
  Group(fsdp_group *raw, std::shared_ptr<detail::GroupEntry> entry) : raw_(raw), entry_(std::move(entry)) {}

  fsdp_group *get() const noexcept { return raw_; }
  fsdp_group_info info() const {
    auto info = detail::sized<fsdp_group_info>();
    detail::check(fsdp_get_group_info(raw_, &info));
    return info;
  }
  std::string name() const { return info().name; }
  fsdp_param param_info(const ParamKey &key) const {
    auto info = detail::sized<fsdp_param>();
    detail::check(fsdp_get_param_info(raw_, find(key), &info));
    return info;
  }
  /** The part of a parameter that a rank stores. */
  fsdp_chunk chunk(const ParamKey &key, std::uint32_t rank) const {
    auto chunk = detail::sized<fsdp_chunk>();
    detail::check(fsdp_get_chunk(raw_, find(key), rank, &chunk));
    return chunk;
  }
  void set_param_lr_scale(const ParamKey &key, double lr_scale) {
    detail::check(fsdp_set_param_lr_scale(raw_, find(key), lr_scale));
  }
  /** Stops training a parameter, or trains it again, between steps and alike on every rank. */
  void set_param_trainable(const ParamKey &key, bool trainable) {
    detail::check(fsdp_set_param_trainable(raw_, find(key), trainable));
  }

  // ---- values

  /** Loads a whole array; with a root, other ranks may give an empty one. */
  template <typename Array>
  void load_param(const ParamKey &key, const Array &values, int root = FSDP_EVERY_RANK) {
    const std::uint64_t index = find(key);
    detail::check(
        fsdp_load_param(raw_, index, data_of(values), dtype_in(values), count_of(values, index, root), root, 0));
  }
  /** Loads a whole plane of a frozen quantized parameter as it is: float8_e4m3 codes, e8m0 or float scales. With a
   * root, other ranks may give an empty one. */
  template <typename Array>
  void load_plane(const ParamKey &key, Plane plane, const Array &values, int root = FSDP_EVERY_RANK) {
    const void *const data = std::size(values) ? data_of(values) : nullptr;
    detail::check(fsdp_load_plane(raw_, find(key), static_cast<fsdp_plane>(plane), data, dtype_in(values),
                                  std::size(values), root, 0));
  }
  template <typename Array>
  void load_state(const ParamKey &key, const std::string &name, const Array &values, int root = FSDP_EVERY_RANK) {
    const std::uint64_t index = find(key);
    detail::check(fsdp_load_state(raw_, index, name.c_str(), data_of(values), dtype_in(values),
                                  count_of(values, index, root), root, 0));
  }
  /** Replaces a whole main gradient, in an update window with gradients. */
  template <typename Array>
  void load_grad(const ParamKey &key, const Array &values, int root = FSDP_EVERY_RANK) {
    const std::uint64_t index = find(key);
    detail::check(
        fsdp_load_grad(raw_, index, data_of(values), dtype_in(values), count_of(values, index, root), root, 0));
  }
  /** Loads whole rows that this rank owns, from row_offset on. */
  template <typename Array>
  void load_chunk(const ParamKey &key, const Array &values, std::uint64_t row_offset) {
    const std::uint64_t index = find(key), row_size = row_size_of(index);
    if (row_size == 0 || std::size(values) % row_size != 0)
      detail::refuse(FSDP_INVALID_ARGUMENT, "these elements are no whole rows of " + std::to_string(row_size));
    detail::check(
        fsdp_load_chunk(raw_, index, data_of(values), dtype_in(values), row_offset, std::size(values) / row_size, 0));
  }
  /** Returns the whole main weights; with a root, the result is empty on other ranks. */
  template <typename T>
  std::vector<T> read_param(const ParamKey &key, int root = FSDP_EVERY_RANK) const {
    const std::uint64_t index = find(key);
    return read_whole<T>(index, root, [&](void *data, std::uint64_t count) {
      return fsdp_read_param(raw_, index, data, raw_dtype<T>, count, root, 0);
    });
  }
  template <typename T>
  std::vector<T> read_state(const ParamKey &key, const std::string &name, int root = FSDP_EVERY_RANK) const {
    const std::uint64_t index = find(key);
    return read_whole<T>(index, root, [&](void *data, std::uint64_t count) {
      return fsdp_read_state(raw_, index, name.c_str(), data, raw_dtype<T>, count, root, 0);
    });
  }
  /** Returns a whole main gradient, as the optimizer will see it; with a root, the result is empty on other ranks. */
  template <typename T>
  std::vector<T> read_grad(const ParamKey &key, int root = FSDP_EVERY_RANK) const {
    const std::uint64_t index = find(key);
    return read_whole<T>(index, root, [&](void *data, std::uint64_t count) {
      return fsdp_read_grad(raw_, index, data, raw_dtype<T>, count, root, 0);
    });
  }

  // ---- weights

  /** Shows the true weights again after a write through views of them. */
  void restore_view() { detail::check(fsdp_restore_view(raw_)); }
  void prefetch(Phase phase, fsdp_stream stream = nullptr) {
    detail::check(fsdp_prefetch(raw_, static_cast<fsdp_phase>(phase), 0, stream));
  }
  /** Makes the full weights readable until the guard ends. */
  [[nodiscard]] Weights unshard(Phase phase, fsdp_stream stream = nullptr) {
    (void)entry();
    return {raw_, entry_, phase, stream};
  }
  /** Makes the full weights of one piece readable until the guard ends. Pieces are numbered from 0. */
  [[nodiscard]] Weights unshard_piece(std::uint32_t piece, Phase phase, fsdp_stream stream = nullptr) {
    (void)entry();
    return {raw_, entry_, phase, stream, piece};
  }
  /** A view without a hold: fsdp_get_param says when it may be read. */
  Tensor get_param(const ParamKey &key, Phase phase) const {
    auto tensor = detail::sized<fsdp_tensor>();
    detail::check(fsdp_get_param(raw_, find(key), static_cast<fsdp_phase>(phase), &tensor));
    return Tensor(tensor);
  }
  /** A view of a plane of a quantized parameter, also without a hold. */
  Tensor get_plane(const ParamKey &key, Phase phase, Plane plane) const {
    auto tensor = detail::sized<fsdp_tensor>();
    detail::check(
        fsdp_get_plane(raw_, find(key), static_cast<fsdp_phase>(phase), static_cast<fsdp_plane>(plane), &tensor));
    return Tensor(tensor);
  }
  /** Writes the scales of an MXFP8 plane, in the order in which GEMMs read them, to memory of the model's device.
   * Returns the bytes needed; with data nullptr it does only that. */
  std::uint64_t swizzle_scales(const ParamKey &key, Phase phase, Plane plane, void *data = nullptr,
                               std::uint64_t size_bytes = 0, fsdp_stream stream = nullptr) const {
    detail::check(fsdp_swizzle_scales(raw_, find(key), static_cast<fsdp_phase>(phase), static_cast<fsdp_plane>(plane),
                                      data, &size_bytes, stream));
    return size_bytes;
  }

  // ---- gradients

  /** flags: FSDP_GRAD_ZEROED, FSDP_GRAD_NO_WAIT (Status::busy where peers have yet to read a buffer). */
  Grad acquire_grad(const ParamKey &key, std::uint32_t flags = 0, fsdp_stream stream = nullptr) {
    auto tensor = detail::sized<fsdp_tensor>();
    std::int32_t accumulate = 0;
    detail::check(fsdp_acquire_grad(raw_, find(key), flags, stream, &tensor, &accumulate));
    return {Tensor(tensor), accumulate != 0};
  }
  /** Returns the gradients of all parameters, in their order; the tensor of a frozen one is false. */
  std::vector<Grad> acquire_grads(std::uint32_t flags = 0, fsdp_stream stream = nullptr) {
    std::vector<fsdp_tensor> tensors(entry().names.size());
    std::vector<std::int32_t> accumulate(tensors.size());
    detail::check(fsdp_acquire_grads(raw_, flags, stream, tensors.data(), tensors.size(), sizeof(fsdp_tensor),
                                     accumulate.data()));
    std::vector<Grad> grads;
    for (std::size_t i = 0; i < tensors.size(); ++i) grads.push_back({Tensor(tensors[i]), accumulate[i] != 0});
    return grads;
  }
  /** Hands in the caller's own gradient, which is copied or added. flags: FSDP_GRAD_NO_WAIT. */
  template <typename Array>
  void put_grad(const ParamKey &key, const Array &values, fsdp_stream stream = nullptr, std::uint32_t flags = 0) {
    detail::refuse_no_data(data_of(values));
    detail::check(fsdp_put_grad(raw_, find(key), data_of(values), dtype_in(values), std::size(values), flags, stream));
  }
  /** Declares that there is no gradient: it counts as zeros. */
  void put_no_grad(const ParamKey &key, fsdp_stream stream = nullptr, std::uint32_t flags = 0) {
    const std::uint64_t index = find(key);
    detail::check(fsdp_put_grad(raw_, index, nullptr, FSDP_FLOAT32, entry().element_count(index), flags, stream));
  }
  /** Declares this gradient complete: nothing more is written into it in this contribution. */
  void complete_grad(const ParamKey &key, fsdp_stream stream = nullptr) {
    detail::check(fsdp_complete_grad(raw_, find(key), 0, stream));
  }
  /** Ends the contribution. flags: FSDP_LAST for the last one of this step. */
  void reduce_grad(std::uint32_t flags = 0, fsdp_stream stream = nullptr) {
    detail::check(fsdp_reduce_grad(raw_, flags, stream));
  }

 private:
  detail::GroupEntry &entry() const {
    if (!entry_) detail::refuse(FSDP_INVALID_HANDLE, "this fsdp::Group names no group");
    return *entry_;
  }
  std::uint64_t find(const ParamKey &key) const { return entry().find(key); }
  template <typename Array>
  static const void *data_of(const Array &values) {
    return std::data(values);
  }
  template <typename Array>
  static constexpr fsdp_dtype dtype_in(const Array &values) {
    return raw_dtype<std::remove_reference_t<decltype(*std::data(values))>>;
  }
  template <typename Array>
  std::uint64_t count_of(const Array &values, std::uint64_t index, int root) const {
    return root != FSDP_EVERY_RANK && std::size(values) == 0 ? entry().element_count(index) : std::size(values);
  }
  std::uint64_t row_size_of(std::uint64_t index) const {
    const fsdp_param param = param_info(index);
    std::uint64_t size = 1;
    for (std::uint32_t d = 1; d < param.dimension_count; ++d) size *= param.shape[d];
    return size;
  }
  template <typename T, typename Call>
  std::vector<T> read_whole(std::uint64_t index, int root, Call call) const {
    const std::uint64_t count = entry().element_count(index);
    std::vector<T> values(static_cast<std::size_t>(count));
    detail::check(call(values.data(), count));
    if (root != FSDP_EVERY_RANK && entry().rank != root) values.clear();
    return values;
  }

  friend class Model;
  fsdp_group *raw_ = nullptr;
  std::shared_ptr<detail::GroupEntry> entry_;
};

}  // namespace fsdp

#endif
