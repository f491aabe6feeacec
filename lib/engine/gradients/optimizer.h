// SPDX-License-Identifier: Apache-2.0
// The work inside the update window: AdamW on this rank's shards, and norms over all ranks.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/gradients/adamw_spans.h"
#include "engine/weights/quantizer.h"
#include "engine/weights/shared_values.h"

namespace fsdp::engine {

// A difference between ranks in their requests for a norm. `odd` is the lowest rank that differs from `first`, the
// first of the ranks that measure the norm together.
struct NormDispute {
  uint32_t odd, first;      // ranks of the job
  bool scaled_differently;  // they scaled differently before the norm; if false, they gave these limits (0: only the
                            // norm)
  double limit_of_odd, limit_of_first;
};

// Elements of an optimizer state in memory. The count lies in the shard.
struct StatePart {
  std::byte *data;
  const uint64_t *count;
  fsdp_dtype dtype;
};

// The parts of weights that this rank counts in their norms, and where each sum goes.
struct WeightSpans {
  std::vector<device::SquaresSpan> plain;
  std::vector<device::CompactSquaresSpan> compact;
};

// The last norm that was asked for.
struct KnownNorm {
  bool measured = false;        // was a norm ever measured?
  std::optional<double> value;  // the norm, if the host has it; if not, it is where it was computed
};

class Optimizer {
 public:
  explicit Optimizer(Runtime &runtime);

  const std::vector<Shard> &shards() const { return shards_; }
  const Shard &shard(uint64_t index, const char *call) const;
  // Must weights and states stay as they are? This is so if the parameter is not trained. In the update window of a
  // step it is also so if no rank has given it a gradient, and it was declared to be skipped then.
  bool is_kept(const Shard &shard) const noexcept { return is_kept(shard.group, shard.param_index); }
  bool is_kept(uint32_t group, uint32_t param_index) const noexcept;
  // Where this rank's part of a state is. The scales of a state in codes are the state NAME.absmax.
  StatePart state(const Shard &shard, const std::string &name, const char *call) const;

  // `further`: norms of other models are added over the ranks of this mesh; NULL: none are. `norm` is NULL if the host
  // need not wait for the norm.
  void grad_norm(const layout::Mesh *further, device::Stream &caller, double *norm);
  // The last norm that was computed, here or for clipping. The calling thread waits for it.
  std::optional<double> last_norm() const;
  const KnownNorm &known_norm() const noexcept { return known_norm_; }
  void set_known_norm(const KnownNorm &norm) noexcept { known_norm_ = norm; }
  // make_batches() makes batches, with a new lr_scale for one parameter if that is given. adopt() installs them and
  // cannot fail.
  std::vector<AdamWBatch> make_batches(const memory::ParamSpec *changed = nullptr, double lr_scale = 0) const;
  void adopt(std::vector<AdamWBatch> batches) noexcept;
  // Called after the set of trained parameters has changed.
  void list_trained() noexcept;
  // Called after the update window has opened, which decides which shards are kept, and after a change of that in it.
  void list_spans() noexcept;
  void param_grad_norms(device::Stream &caller, double *norms, uint64_t count);
  // The same for weights, which need not be trained. A parameter that is not stored as numbers gets NaN.
  void param_weight_norms(device::Stream &caller, double *norms, uint64_t count);
  // The number of zeros in the main grads of the parameters that the step will change.
  uint64_t count_zero_grads(device::Stream &caller);
  // Scales the main grads. The factor is kept for the model's next meeting, where it must be the same on every rank.
  void scale_grads(double factor, device::Stream &caller);
  // The same, but the factor is not kept: the ranks have already agreed on it.
  void multiply_grads(double factor, device::Stream &caller);
  void clip_grads(const layout::Mesh *further, double max_norm, device::Stream &caller, double *norm);
  // The name of the first parameter whose main grad has an Inf or NaN on any rank, or NULL.
  const char *find_nonfinite(device::Stream &caller);
  // Updates main and compute weights; the model publishes them.
  void step_adamw(double lr, const fsdp_adamw_options &options, device::Stream &caller);
  // The numbers of the next step by these options, with defaults filled in.
  StepNumbers numbers(const fsdp_adamw_options &options) const;
  // step_adamw() in a graph: lr and corrections are those that store_steps() has written to the device before the
  // replay.
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
  // `squares` is that of the model on entry, and that of the whole further mesh on return.
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
  WeightSpans list_weights() const;
  const memory::ParamSpec &param_of(const Shard &shard) const noexcept { return shard.param(runtime_); }
  void list_grads() noexcept;
  void cast_kept(device::Stream &stream) const;
  // Scratch memory: one value per parameter for this rank, and then a chunk of parameters for every rank.
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
  // The lists have room for all shards, so that they are rebuilt without allocating.
  std::vector<AdamWBatch> batches_;      // batches of all shards
  std::vector<device::AdamWSpan> kept_;  // spans that a step of AdamW does not change now, but publishes
  std::vector<device::CompactSpan> kept_compact_;
  std::vector<device::FloatSpan> grads_;      // main grads of trained parameters; neighbours are one span
  std::vector<device::SquaresSpan> squares_;  // the counted parts of these; each measurement sets where results go
  std::vector<uint32_t> measured_ordinals_;   // for each of squares_, the number of its parameter in the model
  const WeightSpans weights_;
  std::vector<const char *> names_;  // names of all parameters of the model
  // For each parameter, which ranks of the model count it; empty: all of them. Empty if all groups have one mesh.
  std::vector<std::vector<bool>> counting_;
};

}  // namespace fsdp::engine
