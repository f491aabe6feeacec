// SPDX-License-Identifier: Apache-2.0
// What happens inside the update window: this rank's shards, AdamW, and norms over all ranks.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/weights/quantizer.h"
#include "engine/weights/shared_values.h"

namespace fsdp::engine {

// A rank's part of a trainable parameter. slice is what the optimizer updates; counted is the part of it that this
// rank answers for in norms: with no_shard every rank updates all but counts its virtual shard only.
struct Shard {
  uint32_t group;
  uint32_t param_index;
  uint32_t ordinal;  // of the parameter in the model
  const Bucket *bucket;
  layout::Slice slice;
  layout::Slice counted;
};

struct ShardSpan {
  const Shard *shard;
  device::AdamWSpan span;
};

// Shards that are updated alike, in the order of their addresses. The spans are those that a step changes; what lies
// one behind the other in every plane is one span. The moments are NULL without AdamW.
struct AdamWBatch {
  double lr_scale;
  bool decays;
  device::AdamW step{};  // of the last step
  std::vector<ShardSpan> shards;
  std::vector<device::AdamWSpan> spans;  // has room for all of them
};

// Ranks that asked for different things with a norm: the lowest that differs from the first of those that measure it
// together.
struct NormDispute {
  uint32_t odd, first;      // ranks of the job
  bool scaled_differently;  // before the norm; else they gave these limits, 0 for the norm alone:
  double limit_of_odd, limit_of_first;
};

// The last norm that was asked for.
struct KnownNorm {
  bool measured = false;        // one, ever
  std::optional<double> value;  // if the host has it; else it is where it was found
};

class Optimizer {
 public:
  Optimizer(Runtime &runtime, bool adamw);

  const std::vector<Shard> &shards() const { return shards_; }
  const Shard &shard(uint64_t index, const char *call) const;
  float *main_weight(const Shard &shard) const;
  float *main_grad(const Shard &shard) const;
  // Weights and states are to stay as they are: it is not trained, or, in the update window of a step, no rank has
  // given it a gradient and it asked to be skipped then.
  bool is_kept(const Shard &shard) const noexcept;
  const Plane &state(const Shard &shard, const char *name, const char *call) const;

  // further: other models' norms are added over its ranks; NULL: none. norm: NULL if the host need not wait for it.
  void grad_norm(const layout::Mesh *further, device::Stream &caller, double *norm);
  // The last one that was found, here or to clip. The calling thread waits for it.
  std::optional<double> last_norm() const;
  const KnownNorm &known_norm() const noexcept { return known_norm_; }
  void set_known_norm(const KnownNorm &norm) noexcept { known_norm_ = norm; }
  // Batches with another lr_scale for one parameter, and their adoption, which cannot fail.
  std::vector<AdamWBatch> make_batches(const memory::ParamSpec *changed = nullptr, double lr_scale = 0) const;
  void adopt(std::vector<AdamWBatch> batches) noexcept;
  // After what is trained has changed.
  void list_trained() noexcept;
  // After the update window has opened in which shards are kept, or not, and after a change of that in it.
  void list_spans() noexcept;
  void param_grad_norms(device::Stream &caller, double *norms, uint64_t count);
  // What scales is kept for the model's next meeting, where it must be the same on every rank.
  void scale_grads(double factor, device::Stream &caller);
  // ... and this is not: the ranks have met for it.
  void multiply_grads(double factor, device::Stream &caller);
  void clip_grads(const layout::Mesh *further, double max_norm, device::Stream &caller, double *norm);
  // The first parameter with an Inf or NaN on any rank, or NULL.
  const char *find_nonfinite(device::Stream &caller);
  // Updates main and compute weights; publishing is the model's.
  void step_adamw(double lr, const fsdp_adamw_options &options, device::Stream &caller);
  // What the options say for the next step, with defaults filled in.
  StepNumbers numbers(const fsdp_adamw_options &options) const;
  // The same in a graph: lr and corrections are what store_steps has given to the device before the replay.
  void step_adamw_captured(device::Stream &caller);
  void store_steps(double lr, const fsdp_adamw_options &options, device::Stream &caller);
  // Makes compute weights of main weights where they are not the same.
  void cast_weights(device::Stream &stream);

 private:
  void measure_squares(double *squares, device::Stream &caller);
  void measure_norm(const layout::Mesh *further, double max_norm, device::Stream &caller);
  void measure_further(const layout::Mesh &further, double max_norm, const std::optional<NormDispute> &own,
                       device::Stream &caller);
  void clip_to_norm(device::Stream &caller);
  void require_other_parts(const layout::Mesh &further) const;
  std::optional<NormDispute> meet_for_norm(double max_norm);
  // squares: of the model, then of all of the further mesh.
  std::optional<NormDispute> exchange_further(const layout::Mesh &further, double max_norm, double &squares,
                                              const std::optional<NormDispute> &own);
  void exchange(const double *own, size_t count, const char *what);
  template <class Take>
  void exchange_values(Take take);
  void synchronize(device::Stream &stream);
  std::byte *compute(const Shard &shard) const;
  void make_steps(double lr, const StepNumbers &numbers);
  device::AdamWSpan span_of(const Shard &shard) const;
  const memory::ParamSpec &param_of(const Shard &shard) const noexcept {
    return runtime_.groups[shard.group].spec->params[shard.param_index];
  }
  void list_grads() noexcept;
  void cast_spans(std::span<const device::AdamWSpan> spans, device::Stream &stream) const;
  // scratch: one value a parameter for this rank, then a chunk of parameters for every rank
  double *own_values() const {
    std::byte *const norms = runtime_.storage->own_part(memory::RegionId::norms);
    return reinterpret_cast<double *>(norms + memory::norm_head_bytes);
  }
  device::AdamW *steps() const {
    return reinterpret_cast<device::AdamW *>(runtime_.storage->own_part(memory::RegionId::steps));
  }
  double *all_values() const { return own_values() + runtime_.plan.param_count; }

  Runtime &runtime_;
  bool adamw_;  // else the optimizer is the caller's
  SharedNorm norm_;
  Quantizer quantizer_;
  KnownNorm known_norm_;
  std::vector<Shard> shards_;
  // Lists have room for all shards, so that they are made anew without memory.
  std::vector<AdamWBatch> batches_;           // of all of them
  std::vector<device::AdamWSpan> kept_;       // ... what no step changes now
  std::vector<device::FloatSpan> grads_;      // main grads of what is trained, with neighbours as one
  std::vector<device::SquaresSpan> squares_;  // of what is counted of them; each measurement says where its results go
  std::vector<uint32_t> measured_ordinals_;   // ... of the parameter of each
  std::vector<const char *> names_;           // of all parameters of the model
};

}  // namespace fsdp::engine
