// SPDX-License-Identifier: Apache-2.0
// The groups that train together. Included by fsdp.hpp.
#ifndef FSDP_MODEL_HPP
#define FSDP_MODEL_HPP

#include <fsdp.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "context.hpp"
#include "group.hpp"
#include "matrices.hpp"
#include "shard.hpp"

namespace fsdp {

/** What was loaded: fsdp_loaded. */
using Loaded = fsdp_loaded;

/** A visit of ScheduleKind::visits: of the group of that number in the order of creation, or of one of its pieces. */
struct Visit : fsdp_visit {
  Visit(std::uint32_t group, fsdp_phase phase_) : fsdp_visit{group, phase_, 0} {}
  Visit(std::uint32_t group, Phase phase_) : Visit(group, static_cast<fsdp_phase>(phase_)) {}
  /** Pieces are numbered from 0; fsdp_visit.piece counts them from 1. UINT32_MAX, which no piece has, is left alone. */
  Visit(std::uint32_t group, fsdp_phase phase_, std::uint32_t number)
      : fsdp_visit{group, phase_, number == UINT32_MAX ? number : number + 1} {}
  Visit(std::uint32_t group, Phase phase_, std::uint32_t number)
      : Visit(group, static_cast<fsdp_phase>(phase_), number) {}
};

/** Where a weight of another library's files goes: a '*' in theirs stands for the same text in ours. */
struct Rename {
  std::string theirs, ours;
  std::uint64_t from_row = 0, to_row = 0, row_count = 0;
  std::uint32_t flags = 0;  // FSDP_RENAME_*
};

/** A gradient of apply_grads. */
struct FullGrad : fsdp_grad {
  /** No gradient, which counts as zeros. */
  FullGrad() : fsdp_grad{} {}
  FullGrad(const void *data_, DType dtype_, std::uint64_t element_count_)
      : fsdp_grad{data_, element_count_, static_cast<fsdp_dtype>(dtype_), 0} {
    detail::refuse_no_data(data_);
  }
  template <typename T>
  FullGrad(span<T> values) : FullGrad(values.data(), dtype_of<std::remove_cv_t<T>>::value, values.size()) {}
  template <typename T>
  FullGrad(const std::vector<T> &values) : FullGrad(values.data(), dtype_of<T>::value, values.size()) {}
};

/** The ordered set of groups that train together. Its end never waits for peers. */
class Model {
 public:
  explicit Model(const Context &context, const ModelOptions &options = {}) : hooks_(context.hooks()) {
    fsdp_model *made = nullptr;
    const fsdp_status status = fsdp_create_model(context.get(), &options, &made);
    raw_ = decltype(raw_)(made);
    detail::check(status);
    rank_ = static_cast<int>(context.rank());
  }
  fsdp_model *get() const noexcept { return raw_.get(); }

  // ---- declaring

  Group create_group(const std::string &name, const std::vector<Param> &params, const GroupOptions &options = {}) {
    std::vector<fsdp_param> raws;
    auto entry = std::make_shared<detail::GroupEntry>();
    entry->name = name;
    entry->rank = rank_;
    entry->has_fixed_addresses = has_fixed_addresses_;
    for (const Param &param : params) {
      raws.push_back(param.raw());
      entry->names.push_back(param.own_name);
      entry->pieces.push_back(param.piece);
      entry->are_quantized.push_back(param.quantization != 0);
      std::uint64_t count = 1;
      for (const std::uint64_t size : param.own_shape) count *= size;
      entry->element_counts.push_back(count);
    }
    fsdp_group *made = nullptr;
    detail::check(
        fsdp_create_group(get(), name.c_str(), raws.data(), raws.size(), sizeof(fsdp_param), &options, &made));
    entry->piece_views.resize(entry->pieces.empty() ? 1 : entry->pieces.back() + std::size_t{1});
    groups_.emplace_back(made, std::move(entry));
    return groups_.back();
  }
  /** visits belongs to ScheduleKind::visits. held_groups belongs to ScheduleKind::any: how many groups of copied
   * weights are held at once (0 means 4). */
  void set_schedule(ScheduleKind kind, const std::vector<Visit> &visits = {}, std::uint32_t held_groups = 0) {
    Options<fsdp_schedule_options> options;
    options.held_groups = held_groups;
    if (!visits.empty()) {
      options.visits = visits.data();
      options.visit_count = visits.size();
      options.visit_stride = sizeof(Visit);
    }
    const fsdp_status status = fsdp_set_schedule(get(), static_cast<fsdp_schedule_kind>(kind), &options);
    if (status == FSDP_OK) set_fixed_addresses(kind != ScheduleKind::any);
    detail::check(status);
  }
  void add_optimizer_state(const std::string &name, DType dtype = DType::float32) {
    detail::check(fsdp_add_optimizer_state(get(), name.c_str(), static_cast<fsdp_dtype>(dtype)));
  }
  /** The memory must outlive the model, be aligned to 4096 bytes, and be used by nothing else. */
  void set_arena(Role role, void *data, std::uint64_t size_bytes) {
    detail::check(fsdp_set_arena(get(), static_cast<fsdp_role>(role), data, size_bytes));
  }
  /** What the seal would refuse of this rank's declarations, one line for each violation. */
  std::string check() const {
    return detail::read_text([&](char *buffer, std::uint64_t *size) { return fsdp_check_model(get(), buffer, size); });
  }
  void seal() { detail::check(fsdp_seal_model(get())); }

  // ---- asking

  std::uint64_t group_count() const {
    std::uint64_t count = 0;
    detail::check(fsdp_get_group_count(get(), &count));
    return count;
  }
  Group group(std::uint64_t index) const {
    fsdp_group *found = nullptr;
    detail::check(fsdp_get_group(get(), index, &found));
    return group_of(found);
  }
  Group group(const std::string &name) const {
    fsdp_group *found = nullptr;
    detail::check(fsdp_find_group(get(), name.c_str(), &found));
    return group_of(found);
  }
  /** The parameter of that name: its group, and its number there. */
  std::pair<Group, std::uint64_t> find_param(const std::string &name) const {
    fsdp_group *found = nullptr;
    std::uint64_t index = 0;
    detail::check(fsdp_find_param(get(), name.c_str(), &found, &index));
    return {group_of(found), index};
  }
  std::uint64_t role_bytes(Role role, std::uint32_t rank) const {
    std::uint64_t bytes = 0;
    detail::check(fsdp_get_role_bytes(get(), static_cast<fsdp_role>(role), rank, &bytes));
    return bytes;
  }
  std::uint64_t allocated_bytes(Role role) const {
    std::uint64_t bytes = 0;
    detail::check(fsdp_get_allocated_bytes(get(), static_cast<fsdp_role>(role), &bytes));
    return bytes;
  }
  fsdp_model_info info() const {
    auto info = detail::sized<fsdp_model_info>();
    detail::check(fsdp_get_model_info(get(), &info));
    return info;
  }
  fsdp_stats stats() const {
    auto stats = detail::sized<fsdp_stats>();
    detail::check(fsdp_get_stats(get(), &stats));
    return stats;
  }
  std::string describe() const {
    return detail::read_text(
        [&](char *buffer, std::uint64_t *size) { return fsdp_describe_model(get(), buffer, size); });
  }

  // ---- the end of a step

  /** Waits for all reduces, multiplies main grads by scale, and opens the update window once every rank has come here.
   * flags: FSDP_LAST, on all ranks, if no contribution was marked as the last one. */
  void finish_grads(double scale = 1.0, fsdp_stream stream = nullptr, std::uint32_t flags = 0) {
    detail::check(fsdp_finish_grads(get(), scale, flags, stream));
  }
  /** One step of AdamW, then publish. */
  void step_adamw(double lr, const AdamwOptions &options = {}, fsdp_stream stream = nullptr) {
    detail::check(fsdp_step_adamw(get(), lr, &options, stream));
  }
  void publish_weights(fsdp_stream stream = nullptr) { detail::check(fsdp_publish_weights(get(), stream)); }
  void begin_update(fsdp_stream stream = nullptr) { detail::check(fsdp_begin_update(get(), stream)); }
  /** Discards this step, also after an exception in the middle of a pass. Weights that still exist then return no
   * hold. */
  void discard_step(fsdp_stream stream = nullptr) {
    const fsdp_status status = fsdp_discard_step(get(), stream);
    if (status == FSDP_OK)
      for (const Group &group : groups_) ++group.entry_->discards;
    detail::check(status);
  }
  void check_replicas(fsdp_stream stream = nullptr) { detail::check(fsdp_check_replicas(get(), 0, stream)); }

  double get_grad_norm(const Mesh *mesh = nullptr, fsdp_stream stream = nullptr) {
    double norm = 0;
    detail::check(fsdp_get_grad_norm(get(), mesh ? mesh->get() : nullptr, stream, &norm));
    return norm;
  }
  double get_last_norm() const {
    double norm = 0;
    detail::check(fsdp_get_last_norm(get(), &norm));
    return norm;
  }
  std::vector<double> get_param_grad_norms(fsdp_stream stream = nullptr) {
    std::vector<double> norms(static_cast<std::size_t>(info().param_count));
    detail::check(fsdp_get_param_grad_norms(get(), stream, norms.data(), norms.size()));
    return norms;
  }
  /** NaN for a frozen parameter that has no numbers; at any time between the seal and the end. */
  std::vector<double> get_param_weight_norms(fsdp_stream stream = nullptr) {
    std::vector<double> norms(static_cast<std::size_t>(info().param_count));
    detail::check(fsdp_get_param_weight_norms(get(), stream, norms.data(), norms.size()));
    return norms;
  }
  /** The number of zeros in the main grads with which the step will change weights. */
  std::uint64_t count_zero_grads(fsdp_stream stream = nullptr) {
    std::uint64_t zeros = 0;
    detail::check(fsdp_count_zero_grads(get(), stream, &zeros));
    return zeros;
  }
  void scale_grads(double factor, fsdp_stream stream = nullptr) {
    detail::check(fsdp_scale_grads(get(), factor, stream));
  }
  /** The norm before clipping; one that is not finite leaves the gradients alone. */
  double clip_grads(double max_norm, const Mesh *mesh = nullptr, fsdp_stream stream = nullptr) {
    double norm = 0;
    detail::check(fsdp_clip_grads(get(), mesh ? mesh->get() : nullptr, max_norm, stream, &norm));
    return norm;
  }
  /** The name of the first parameter whose main grads have Inf or NaN on any rank, or "". */
  std::string check_grads(fsdp_stream stream = nullptr) {
    std::int32_t found = 0;
    const char *name = nullptr;
    detail::check(fsdp_check_grads(get(), stream, &found, &name));
    return found && name ? name : "";
  }
  std::vector<Shard> shards() const {
    std::uint64_t count = 0;
    detail::check(fsdp_get_shard_count(get(), &count));
    std::vector<Shard> shards;
    for (std::uint64_t i = 0; i < count; ++i) shards.emplace_back(get(), i);
    return shards;
  }
  /** This rank's shards at home in a file, chunk by chunk: call next() until there are no more. for_each_shard_chunk
   * does so. */
  ShardChunks shard_chunks(fsdp_stream stream = nullptr) { return ShardChunks(get(), stream); }
  /** Begins to bring each matrix of the model whole to one rank. Then call next() of what this returns until there are
   * no more, and give_back(); for_each_matrix makes all of these calls. */
  Matrices collect_matrices(const MatrixOptions &options = {}, fsdp_stream stream = nullptr) {
    return Matrices(get(), options, stream);
  }
  /** The owners, the costs, the waves and the bytes of the matrices, as JSON. */
  std::string matrix_plan() const {
    return detail::read_text(
        [&](char *buffer, std::uint64_t *size) { return fsdp_get_matrix_plan(get(), buffer, size); });
  }
  /** A whole step in one call. max_norm 0 does not clip; the norm before clipping is returned. */
  double apply_grads(const std::vector<FullGrad> &grads, double lr, double max_norm = 0,
                     const AdamwOptions &options = {}, fsdp_stream stream = nullptr) {
    double norm = 0;
    detail::check(
        fsdp_apply_grads(get(), grads.data(), grads.size(), sizeof(FullGrad), lr, max_norm, &options, stream, &norm));
    return norm;
  }

  // ---- checkpoints

  void save(const std::string &folder, const SaveOptions &options = {}) {
    detail::check(fsdp_save(get(), folder.c_str(), &options));
  }
  Loaded load(const std::string &folder, const LoadOptions &options = {}) {
    auto loaded = detail::sized<fsdp_loaded>();
    detail::check(fsdp_load(get(), folder.c_str(), &options, &loaded));
    return loaded;
  }
  /** Loads only weights, from safetensors files of any library. */
  Loaded load_weights(const std::string &path, const std::vector<Rename> &renames = {},
                      const LoadOptions &options = {}) {
    std::vector<fsdp_rename> raws;
    for (const Rename &r : renames)
      raws.push_back({r.theirs.c_str(), r.ours.c_str(), r.from_row, r.to_row, r.row_count, r.flags, 0});
    auto loaded = detail::sized<fsdp_loaded>();
    detail::check(
        fsdp_load_weights(get(), path.c_str(), raws.data(), raws.size(), sizeof(fsdp_rename), &options, &loaded));
    return loaded;
  }
  /** The last load as JSON: the names of what was loaded, missing and unexpected. */
  std::string describe_load() const {
    return detail::read_text(
        [&](char *buffer, std::uint64_t *size) { return fsdp_describe_load(get(), buffer, size); });
  }

  const detail::KeptHooks &hooks() const noexcept { return hooks_; }

 private:
  void set_fixed_addresses(bool are_fixed) noexcept {
    has_fixed_addresses_ = are_fixed;
    for (const Group &group : groups_) group.entry_->has_fixed_addresses = are_fixed;
  }
  Group group_of(fsdp_group *raw) const {
    for (const Group &group : groups_)
      if (group.get() == raw) return group;
    detail::refuse(FSDP_INTERNAL, "the library knows a group that was not created here");
  }

  detail::KeptHooks hooks_;  // outlives raw_
  detail::Handle<fsdp_model, fsdp_destroy_model> raw_;
  std::vector<Group> groups_;
  int rank_ = 0;
  bool has_fixed_addresses_ = true;
};

/** Calls f(const Matrix &) for all matrices of this rank, and brings the rows back. An exception of f leaves the
 *  matrices collected: discard the step on every rank. */
template <typename Function>
void for_each_matrix(Model &model, const MatrixOptions &options, fsdp_stream stream, Function f) {
  Matrices matrices = model.collect_matrices(options, stream);
  while (const std::optional<Matrix> matrix = matrices.next()) f(*matrix);
  matrices.give_back();
}
template <typename Function>
void for_each_matrix(Model &model, Function f) {
  for_each_matrix(model, MatrixOptions{}, nullptr, std::move(f));
}

/** Calls f(const ShardChunk &) for all chunks of this rank. An exception of f leaves the pass unfinished: take the rest
 *  from Model::shard_chunks before you publish. */
template <typename Function>
void for_each_shard_chunk(Model &model, fsdp_stream stream, Function f) {
  ShardChunks chunks = model.shard_chunks(stream);
  while (const std::optional<ShardChunk> chunk = chunks.next()) f(*chunk);
}
template <typename Function>
void for_each_shard_chunk(Model &model, Function f) {
  for_each_shard_chunk(model, nullptr, std::move(f));
}

static_assert(sizeof(FullGrad) == sizeof(fsdp_grad), "an array of them is one of the header's");
static_assert(sizeof(Visit) == sizeof(fsdp_visit), "an array of them is one of the header's");

}  // namespace fsdp

#endif
