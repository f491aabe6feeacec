// SPDX-License-Identifier: Apache-2.0
// The weights of a group or a piece, while they are held. Included by fsdp.hpp.
#ifndef FSDP_WEIGHTS_HPP
#define FSDP_WEIGHTS_HPP

#include <fsdp.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "options.hpp"
#include "param.hpp"
#include "tensor.hpp"

namespace fsdp {

namespace detail {

/** Views of consecutive parameters of a group, by phase. */
using ViewTable = std::array<std::vector<Tensor>, 4>;

/** What the model keeps of a group. If addresses of views are fixed from the seal on, they are asked for once. With
 * ScheduleKind::any each hold may have other addresses. */
struct GroupEntry {
  std::string name;
  std::vector<std::string> names;
  std::vector<std::uint64_t> element_counts;
  std::vector<std::uint32_t> pieces;  // the piece of each parameter, which never falls
  std::vector<bool> are_quantized;
  ViewTable views;  // of the whole group
  std::vector<ViewTable> piece_views;
  bool has_fixed_addresses = true;
  int rank = 0;                // of the context
  std::uint64_t discards = 0;  // of steps of the model

  std::uint64_t find(const ParamKey &key) const {
    if (!key.is_name()) return key.index();
    for (std::size_t i = 0; i < names.size(); ++i)
      if (names[i] == key.name()) return i;
    refuse(FSDP_INVALID_ARGUMENT, "group " + name + " has no parameter " + std::string(key.name()));
  }
  /** The numbers of the parameters of a piece, or of all: from the first one to that behind the last one. */
  std::pair<std::size_t, std::size_t> params_of(const std::optional<std::uint32_t> &piece) const {
    if (!piece) return {0, names.size()};
    const auto found = std::equal_range(pieces.begin(), pieces.end(), *piece);
    return {static_cast<std::size_t>(found.first - pieces.begin()),
            static_cast<std::size_t>(found.second - pieces.begin())};
  }
  std::uint64_t element_count(std::uint64_t index) const {
    return index < element_counts.size() ? element_counts[static_cast<std::size_t>(index)] : 0;
  }
};

}  // namespace detail

/**
 * The full compute weights of an unsharded group, or of one of its pieces: a hold, which ends with the guard.
 * weights["w"] is a view of one parameter:
 *
 *   auto weights = group.unshard(fsdp::Phase::forward);
 *   fsdp::span<const float> w = weights["w"];
 *
 * Views end with it, and it ends before the model. A guard of a piece has views of the parameters of that piece.
 */
class Weights {
 public:
  Weights(fsdp_group *group, std::shared_ptr<detail::GroupEntry> entry, Phase phase, fsdp_stream stream,
          std::optional<std::uint32_t> piece = std::nullopt)
      : group_(group),
        entry_(std::move(entry)),
        phase_(phase),
        stream_(stream),
        piece_(piece),
        discards_(entry_->discards) {
    const fsdp_status status = take_hold();
    try {
      detail::check(status);  // also throws what a hook has thrown
      std::tie(first_, end_) = entry_->params_of(piece_);
      auto &views = entry_->has_fixed_addresses ? kept_views() : own_views_;
      if (views.empty()) ask_for(views);
      views_ = views.data();
    } catch (...) {
      if (status == FSDP_OK) (void)return_hold();  // no destructor runs, because the constructor throws
      throw;
    }
  }
  Weights(Weights &&other) noexcept
      : group_(std::exchange(other.group_, nullptr)),
        entry_(std::move(other.entry_)),
        own_views_(std::move(other.own_views_)),
        views_(other.views_),
        first_(std::exchange(other.first_, 0)),
        end_(std::exchange(other.end_, 0)),
        phase_(other.phase_),
        stream_(other.stream_),
        piece_(other.piece_),
        discards_(other.discards_) {}
  Weights &operator=(Weights &&) = delete;
  ~Weights() {
    if (group_) (void)return_hold();  // fails if the hold is gone: with its model, or in a failed context
  }

  const Tensor &operator[](const ParamKey &key) const {
    if (!group_) refuse_gone();
    const std::uint64_t index = entry_->find(key);
    if (index < first_ || index >= end_) refuse_param(index);
    return views_[index - first_];
  }
  /** weights.get<float>("w") is weights["w"].as<const float>(). */
  template <typename T>
  span<const T> get(const ParamKey &key) const {
    return (*this)[key].template as<const T>();
  }
  /** The number of the first parameter that has a view here: 0, or that of the first one in the piece. */
  std::size_t first() const noexcept { return first_; }
  /** How many parameters have a view here. */
  std::size_t size() const noexcept { return end_ - first_; }

  /** Returns the hold now, and throws if that fails. */
  void reshard() {
    if (!group_) refuse_gone();
    const fsdp_status status = return_hold();
    group_ = nullptr;
    detail::check(status);
  }

 private:
  fsdp_phase raw_phase() const noexcept { return static_cast<fsdp_phase>(phase_); }
  fsdp_status take_hold() noexcept {
    return piece_ ? fsdp_unshard_piece(group_, *piece_, raw_phase(), 0, stream_)
                  : fsdp_unshard(group_, raw_phase(), 0, stream_);
  }
  // A discarded step has taken back its holds, so a reshard would return the hold of a later unshard.
  fsdp_status return_hold() noexcept {
    if (discards_ != entry_->discards) return FSDP_OK;
    return piece_ ? fsdp_reshard_piece(group_, *piece_, raw_phase(), 0, stream_)
                  : fsdp_reshard(group_, raw_phase(), 0, stream_);
  }
  std::vector<Tensor> &kept_views() const {
    detail::ViewTable &table = piece_ ? entry_->piece_views.at(*piece_) : entry_->views;
    return table[static_cast<std::size_t>(raw_phase() - 1) % 4];
  }
  void ask_for(std::vector<Tensor> &views) {
    if (piece_) return ask_for_piece(views);
    std::vector<fsdp_tensor> raws(entry_->names.size());
    detail::check(fsdp_get_params(group_, raw_phase(), raws.data(), raws.size(), sizeof(fsdp_tensor)));
    views = std::vector<Tensor>(raws.begin(), raws.end());
  }
  void ask_for_piece(std::vector<Tensor> &views) {
    std::vector<Tensor> found;
    for (std::size_t index = first_; index < end_; ++index) {
      auto raw = detail::sized<fsdp_tensor>();
      if (entry_->are_quantized[index])
        describe(index, raw);
      else
        detail::check(fsdp_get_param(group_, index, raw_phase(), &raw));
      found.emplace_back(raw);
    }
    views = std::move(found);
  }
  // Of a quantized parameter, which has planes and no data, as fsdp_get_params does. Without data no device counts.
  void describe(std::size_t index, fsdp_tensor &raw) const {
    auto param = detail::sized<fsdp_param>();
    detail::check(fsdp_get_param_info(group_, index, &param));
    raw.shape = param.shape;
    raw.dimension_count = param.dimension_count;
    raw.dtype = param.dtype;
    raw.element_count = entry_->element_counts[index];
    raw.element_size = static_cast<std::uint32_t>(get_dtype_size(static_cast<DType>(param.dtype)));
    raw.flags = FSDP_TENSOR_READ_ONLY;
    raw.device = FSDP_DEVICE_HOST;
  }
  [[noreturn]] void refuse_param(std::uint64_t index) const {
    const std::string group = "group " + entry_->name;
    if (index >= entry_->names.size())
      detail::refuse(FSDP_INVALID_ARGUMENT, group + " has no parameter number " + std::to_string(index));
    const auto at = static_cast<std::size_t>(index);
    const std::string own = std::to_string(entry_->pieces[at]);
    detail::refuse(FSDP_INVALID_STATE, entry_->names[at] + " is in piece " + own + " of " + group +
                                           ", and these weights are of piece " + std::to_string(piece_.value_or(0)) +
                                           ": call unshard_piece(" + own + ", ...)");
  }
  [[noreturn]] static void refuse_gone() {
    detail::refuse(FSDP_INVALID_STATE, "these weights were resharded or moved from");
  }

  fsdp_group *group_;
  std::shared_ptr<detail::GroupEntry> entry_;
  std::vector<Tensor> own_views_;  // where no addresses are kept
  const Tensor *views_ = nullptr;
  std::size_t first_ = 0, end_ = 0;  // numbers of the parameters that have views
  Phase phase_;
  fsdp_stream stream_;
  std::optional<std::uint32_t> piece_;
  std::uint64_t discards_;
};

}  // namespace fsdp

#endif
