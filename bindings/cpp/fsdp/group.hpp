// SPDX-License-Identifier: Apache-2.0
// A parameter group: its weights, its gradients. Included by fsdp.hpp.
#ifndef FSDP_GROUP_HPP
#define FSDP_GROUP_HPP

#include <fsdp.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
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
  /** Lets ranks divide it in so many of its leading dimensions: 2 divides the matrices of a stack [E, R, C]. */
  Param &rows_in(std::uint32_t dimensions) {
    row_dimensions = dimensions;
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
    raw.global_shape = own_global_shape.empty() ? nullptr : own_global_shape.data();
    raw.global_offset = own_global_offset.empty() ? nullptr : own_global_offset.data();
    return raw;
  }

  std::string own_name;
  std::vector<std::uint64_t> own_shape, own_global_shape, own_global_offset;
};

/** What names a parameter of a group: its number in the order of declaration, or its name. */
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

namespace detail {

/** What the model keeps of a group. If addresses of views are fixed from the seal on, they are asked for once. With
 * ScheduleKind::any each hold may have other addresses. */
struct GroupEntry {
  std::string name;
  std::vector<std::string> names;
  std::vector<std::uint64_t> element_counts;
  std::array<std::vector<Tensor>, 4> views;  // by phase
  bool has_fixed_addresses = true;
  int rank = 0;                // of the context
  std::uint64_t discards = 0;  // of steps of the model

  std::uint64_t find(const ParamKey &key) const {
    if (!key.is_name()) return key.index();
    for (std::size_t i = 0; i < names.size(); ++i)
      if (names[i] == key.name()) return i;
    refuse(FSDP_INVALID_ARGUMENT, "group " + name + " has no parameter " + std::string(key.name()));
  }
  std::uint64_t element_count(std::uint64_t index) const {
    return index < element_counts.size() ? element_counts[static_cast<std::size_t>(index)] : 0;
  }
};

}  // namespace detail

/**
 * The full compute weights of an unsharded group: a hold, which ends with the guard. weights["w"] is a view of one
 * parameter:
 *
 *   auto weights = group.unshard(fsdp::Phase::forward);
 *   fsdp::span<const float> w = weights["w"];
 *
 * Views end with it, and it ends before the model.
 */
class Weights {
 public:
  Weights(fsdp_group *group, std::shared_ptr<detail::GroupEntry> entry, Phase phase, fsdp_stream stream)
      : group_(group), entry_(std::move(entry)), phase_(phase), stream_(stream), discards_(entry_->discards) {
    auto &kept_views = entry_->views[static_cast<std::size_t>(static_cast<fsdp_phase>(phase) - 1) % 4];
    auto &views = entry_->has_fixed_addresses ? kept_views : own_views_;
    const fsdp_status status = fsdp_unshard(group, static_cast<fsdp_phase>(phase), 0, stream);
    try {
      detail::check(status);  // also throws what a hook has thrown
      if (views.empty()) ask_for(views);
    } catch (...) {
      if (status == FSDP_OK) (void)return_hold();  // no destructor runs for an object that was never whole
      throw;
    }
    views_ = views.data();
  }
  Weights(Weights &&other) noexcept
      : group_(std::exchange(other.group_, nullptr)),
        entry_(std::move(other.entry_)),
        own_views_(std::move(other.own_views_)),
        views_(other.views_),
        phase_(other.phase_),
        stream_(other.stream_),
        discards_(other.discards_) {}
  Weights &operator=(Weights &&) = delete;
  ~Weights() {
    if (group_) (void)return_hold();  // fails where the hold has gone: with its model, or in a context that has failed
  }

  const Tensor &operator[](const ParamKey &key) const {
    if (!group_) refuse_gone();
    const std::uint64_t index = entry_->find(key);
    if (index >= entry_->names.size())
      detail::refuse(FSDP_INVALID_ARGUMENT,
                     "group " + entry_->name + " has no parameter number " + std::to_string(index));
    return views_[index];
  }
  /** weights.get<float>("w") is weights["w"].as<const float>(). */
  template <typename T>
  span<const T> get(const ParamKey &key) const {
    return (*this)[key].template as<const T>();
  }
  std::size_t size() const noexcept { return entry_ ? entry_->names.size() : 0; }

  /** Returns the hold now, and throws if that fails. */
  void reshard() {
    if (!group_) refuse_gone();
    const fsdp_status status = return_hold();
    group_ = nullptr;
    detail::check(status);
  }

 private:
  // A discarded step has forgotten its holds: a reshard would return the hold of a later unshard.
  fsdp_status return_hold() noexcept {
    if (discards_ != entry_->discards) return FSDP_OK;
    return fsdp_reshard(group_, static_cast<fsdp_phase>(phase_), 0, stream_);
  }
  void ask_for(std::vector<Tensor> &views) {
    std::vector<fsdp_tensor> raws(entry_->names.size());
    const fsdp_status status =
        fsdp_get_params(group_, static_cast<fsdp_phase>(phase_), raws.data(), raws.size(), sizeof(fsdp_tensor));
    detail::check(status);
    views = std::vector<Tensor>(raws.begin(), raws.end());
  }
  [[noreturn]] static void refuse_gone() {
    detail::refuse(FSDP_INVALID_STATE, "these weights were resharded or moved from");
  }

  fsdp_group *group_;
  std::shared_ptr<detail::GroupEntry> entry_;
  std::vector<Tensor> own_views_;  // where no addresses are kept
  const Tensor *views_ = nullptr;
  Phase phase_;
  fsdp_stream stream_;
  std::uint64_t discards_;
};

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

/** A group of a model; copies name the same one. An array is whatever has data and size: std::vector, std::array, a
 * span. */
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
