// SPDX-License-Identifier: Apache-2.0
// What happens inside the update window: this rank's shards, norms over all ranks, and AdamW.
#pragma once

#include <string>
#include <vector>

#include "engine/runtime.h"

namespace fsdp::engine {

// A rank's part of a trainable parameter. slice is what the optimizer updates; counted is the part of it that this
// rank answers for in norms: with no_shard every rank updates all but counts its virtual shard only.
struct Shard {
  uint32_t group;
  uint32_t param_index;
  uint32_t ordinal;  // of the parameter in the model
  uint32_t bucket;
  layout::Slice slice;
  layout::Slice counted;
};

// Shards that are updated alike, in the order of their addresses; those that lie one behind the other in every plane
// are one span. The moments are NULL without AdamW.
struct Batch {
  double lr_scale;
  bool decays;
  device::AdamW step{};  // of the last step
  std::vector<device::AdamWSpan> spans;
};

class Optimizer {
 public:
  Optimizer(Runtime &runtime, bool adamw);

  const std::vector<Shard> &shards() const { return shards_; }
  const Shard &shard(uint64_t index, const char *call) const;
  float *main_weight(const Shard &shard) const;
  float *main_grad(const Shard &shard) const;
  const Plane &state(const Shard &shard, const char *name, const char *call) const;

  double grad_norm(device::Stream &caller);
  void param_grad_norms(device::Stream &caller, double *norms, uint64_t count);
  void scale_grads(double factor, device::Stream &caller);
  double clip_grads(double max_norm, device::Stream &caller);
  // The first parameter with an Inf or NaN on any rank, or NULL.
  const char *find_nonfinite(device::Stream &caller);
  // Updates main and compute weights; publishing is the model's.
  void step_adamw(double lr, const fsdp_adamw_options &options, device::Stream &caller);
  // The same in a graph: lr and corrections are what store_steps has given to the device before the replay.
  void step_adamw_captured(device::Stream &caller);
  void store_steps(double lr, const fsdp_adamw_options &options, device::Stream &caller);
  // Casts main weights to compute weights where they are not the same.
  void cast_weights(device::Stream &stream);

 private:
  void measure_squares(device::Stream &caller);
  comm::Team &holders() const;
  void exchange(const double *own, size_t count, const char *what);
  template <class Take>
  void exchange_values(Take take);
  void synchronize(device::Stream &stream);
  std::byte *compute(const Shard &shard) const;
  void make_batches();
  void make_steps(double lr, const fsdp_adamw_options &options, uint64_t step_number);
  device::AdamWSpan span_of(const Shard &shard) const;
  // scratch: one value a parameter for this rank, then a chunk of parameters for every rank
  double *own_values() const { return runtime_.storage->scratch(); }
  double *all_values() const { return own_values() + runtime_.plan.param_count; }

  Runtime &runtime_;
  bool adamw_;  // else the optimizer is the caller's
  std::vector<Shard> shards_;
  std::vector<Batch> batches_;  // of all of them
  std::vector<const char *> names_;  // of all parameters of the model
};

}  // namespace fsdp::engine
