// SPDX-License-Identifier: Apache-2.0
// The work inside the update window: AdamW on this rank's shards, and norms over all ranks.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/gradients/adamw_spans.h"
#include "engine/gradients/home_update.h"
#include "engine/gradients/shard_states.h"
#include "engine/gradients/weight_norms.h"
#include "engine/weights/quantizer.h"
#include "engine/weights/shared_values.h"

namespace fsdp::engine {

// A difference between the requests of ranks for a norm. `odd` is the lowest rank that differs from `first`, the first
// of the ranks that measure the norm together.
struct NormDispute {
  uint32_t odd, first;      // ranks of the job
  bool scaled_differently;  // true: their scalings differ; false: their limits (0: only the norm)
  double limit_of_odd, limit_of_first;
};

// The last norm that was asked for.
struct KnownNorm {
  bool measured = false;        // has a norm ever been computed?
  std::optional<double> value;  // the norm if the host has it; if not, it is still in the memory where it was computed
};

class Optimizer {
 public:
  explicit Optimizer(Runtime &runtime);

  const std::vector<Shard> &shards() const { return shards_; }
  const Shard &shard(uint64_t index, const char *call) const;
  // Must the step leave weights and states unchanged? It must if the parameter is not trained. In the update window it
  // also must if the parameter was declared to be skipped without a gradient, and no rank has one.
  bool is_kept(const Shard &shard) const noexcept { return is_kept(shard.group, shard.param_index); }
  bool is_kept(uint32_t group, uint32_t param_index) const noexcept;
  // The memory of this rank's part of a state; its data is NULL if the state is at home in a file.
  StatePart state(const Shard &shard, std::string_view name, const char *call) const;
  HomeUpdate *home() { return home_ ? &*home_ : nullptr; }

  // `further`: the mesh over whose ranks the norms of other models are added; NULL: none. `norm` is NULL if the host
  // need not wait for the norm.
  void grad_norm(const layout::Mesh *further, device::Stream &caller, double *norm);
  // The norm that was computed last, here or for clipping. The calling thread waits for it.
  std::optional<double> last_norm() const;
  const KnownNorm &known_norm() const noexcept { return known_norm_; }
  void set_known_norm(const KnownNorm &norm) noexcept { known_norm_ = norm; }
  // make_batches() makes batches; it uses a new lr_scale for one parameter if `changed` is not NULL. adopt() installs
  // the batches and cannot fail.
  std::vector<AdamWBatch> make_batches(const memory::ParamSpec *changed = nullptr, double lr_scale = 0) const;
  void adopt(std::vector<AdamWBatch> batches) noexcept;
  // Called after the set of trained parameters has changed.
  void list_trained() noexcept;
  // Called after the update window has opened, because that decides which shards are kept, and after each later change
  // of the kept shards.
  void list_spans() noexcept;
  void param_grad_norms(device::Stream &caller, double *norms, uint64_t count);
  // Does the same for weights, which need not be trained. A parameter that is not stored as numbers gets NaN.
  void param_weight_norms(device::Stream &caller, double *norms, uint64_t count);
  // The number of zeros in the main grads of the parameters that the step will update.
  uint64_t count_zero_grads(device::Stream &caller);
  // Scales the main grads. The factor is kept for the model's next meeting, in which it must be the same on every rank.
  void scale_grads(double factor, device::Stream &caller);
  // Scales the main grads without keeping the factor, because the ranks have already agreed on it.
  void multiply_grads(double factor, device::Stream &caller);
  void clip_grads(const layout::Mesh *further, double max_norm, device::Stream &caller, double *norm);
  // Makes the main grads in the file what calls have scaled them to.
  void settle_grads() {
    if (home_) home_->settle_grads();
  }
  // Called when the window has closed or its step was discarded.
  void close() noexcept {
    if (home_) home_->drop_grads();
  }
  // The name of the first parameter whose main grad has an Inf or NaN on any rank, or NULL.
  const char *find_nonfinite(device::Stream &caller);
  // Updates main and compute weights; the model publishes them.
  void step_adamw(double lr, const fsdp_adamw_options &options, device::Stream &caller);
  // The numbers of the next step with these options; defaults are filled in.
  StepNumbers numbers(const fsdp_adamw_options &options) const;
  // Does step_adamw() in a graph. store_steps() writes lr and corrections to the device before each replay.
  void step_adamw_captured(device::Stream &caller);
  void store_steps(double lr, const fsdp_adamw_options &options, device::Stream &caller);
  // Converts main weights to compute weights where the two are different memory.
  void cast_weights(device::Stream &stream);

 private:
  void measure_squares(double *squares, device::Stream &caller);
  void measure_norm(const layout::Mesh *further, double max_norm, device::Stream &caller);
  void measure_further(const layout::Mesh &further, double max_norm, const std::optional<NormDispute> &own,
                       device::Stream &caller);
  void clip_to_norm(device::Stream &caller);
  void require_other_parts(const layout::Mesh &further) const;
  std::optional<NormDispute> meet_for_norm(double max_norm);
  // On entry, `squares` is the model's sum of squares; on return, the sum over the whole further mesh.
  std::optional<NormDispute> exchange_further(const layout::Mesh &further, double max_norm, double &squares,
                                              const std::optional<NormDispute> &own);
  void exchange(const double *own, size_t count, const char *what);
  template <class Take>
  void exchange_values(const char *what, Take take);
  void list_counting_ranks();
  bool is_counted_by(size_t ordinal, uint32_t holder) const {
    return counting_.empty() || counting_[ordinal].empty() || counting_[ordinal][holder];
  }
  const char *name_on(size_t ordinal, uint32_t holder) const;
  void check_norm_count(uint64_t count, const char *call) const;
  void add_norms(const char *what, double *norms);
  void synchronize(device::Stream &stream);
  void make_steps(double lr, const StepNumbers &numbers);
  void clear_codes();
  const memory::ParamSpec &param_of(const Shard &shard) const noexcept { return shard.param(runtime_); }
  void list_grads() noexcept;
  void cast_kept(device::Stream &stream) const;
  // Scratch memory: one value per parameter for this rank, followed by a chunk of parameters for every rank.
  double *own_values() const {
    std::byte *const norms = runtime_.storage->own_part(memory::RegionId::norms);
    return reinterpret_cast<double *>(norms + memory::norm_head_bytes);
  }
  device::AdamW *steps() const {
    return reinterpret_cast<device::AdamW *>(runtime_.storage->own_part(memory::RegionId::steps));
  }
  double *all_values() const { return own_values() + runtime_.plan.param_count; }

  Runtime &runtime_;
  SharedNorm norm_;
  Quantizer quantizer_;
  KnownNorm known_norm_;
  std::vector<Shard> shards_;
  // The lists have room for all shards, so a rebuild allocates nothing.
  std::vector<AdamWBatch> batches_;      // batches of all shards
  std::vector<device::AdamWSpan> kept_;  // spans that a step of AdamW leaves unchanged now, but publishes
  std::vector<device::CompactSpan> kept_compact_;
  std::vector<device::FloatSpan> grads_;      // main grads of trained parameters; neighbours are one span
  std::vector<device::SquaresSpan> squares_;  // the counted parts of grads_; each measurement sets where results go
  std::vector<uint32_t> measured_ordinals_;   // for each of squares_, the number of its parameter in the model
  WeightNorms weights_;
  std::vector<const char *> names_;   // names of all parameters of the model
  std::optional<HomeUpdate> home_;    // NULL: no planes are in a file
  std::vector<uint8_t> kept_shards_;  // by shard, for home_
  // For each parameter, the ranks of the model that count it; an empty entry means all ranks. The list is empty if all
  // groups have one mesh.
  std::vector<std::vector<bool>> counting_;
};

}  // namespace fsdp::engine
