// SPDX-License-Identifier: Apache-2.0
// This rank's part of each trainable parameter, and the arguments of the kernels with which AdamW updates it.
#pragma once

#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// A rank's part of a trainable parameter. The optimizer updates `slice`; `counted` is the part of `slice` that this
// rank counts in norms. With no_shard every rank updates everything, but counts only its virtual shard.
struct Shard {
  uint32_t group;
  uint32_t param_index;
  uint32_t ordinal;  // number of the parameter, in the model
  const Bucket *bucket;
  uint32_t tensor;  // index in the bucket
  layout::Slice slice;
  layout::Slice counted;  // the slot of the parameter that this rank counts
  bool answers;           // does this rank count its slot where the model's ranks add values (Runtime::answers_for)?
  uint64_t scale_count;   // the number of scales of each of AdamW's states, if they are in codes

  const memory::ParamSpec &param(const Runtime &runtime) const {
    return runtime.groups[group].spec->params[param_index];
  }
  // NULL if the main weights are kept in two halves. In that case their dtype is 0.
  std::byte *main_weight() const { return is_split() ? nullptr : bucket->plane(PlaneKind::main).at(slice); }
  fsdp_dtype main_weight_dtype() const { return is_split() ? 0 : bucket->plane(PlaneKind::main).dtype(); }
  float *main_grad() const { return reinterpret_cast<float *>(bucket->plane(PlaneKind::grad).at(slice)); }
  bool is_split() const { return bucket->has(PlaneKind::rest); }
};

// Are weights or states of the shard stored in fewer bits than fp32?
bool is_compact(const Shard &shard);
// The arguments for `count` elements of a shard from element `first` on; the second function is for compact shards, and
// their `first` is the first element of a block of states in codes. If the caller updates the shard, its moments are
// NULL.
device::AdamWSpan span_of(const Runtime &runtime, const Shard &shard, uint64_t first, uint64_t count);
std::vector<device::CompactSpan> compact_spans_of(const Runtime &runtime, const Shard &shard, uint64_t first,
                                                  uint64_t count);

// Shards that are updated alike, in the order of their addresses. `spans` are the memory that a step changes. Shards
// that are adjacent in every plane are one span. If the caller updates a shard, its moments are NULL. `compact_shards`
// and `compact` are the same lists for shards with weights or states in fewer bits than fp32; such a shard may have
// several spans.
struct AdamWBatch {
  template <class Span>
  struct Of {
    const Shard *shard;
    Span span;
  };

  double lr_scale = 1;
  bool decays = true;
  device::AdamW step{};  // the arguments of the last step
  std::vector<Of<device::AdamWSpan>> shards;
  std::vector<Of<device::CompactSpan>> compact_shards;
  std::vector<device::AdamWSpan> spans;      // has room for all shards
  std::vector<device::CompactSpan> compact;  // has room for all shards, too

  void add(const Runtime &runtime, const Shard &shard);
  // Must be called after the last add().
  void order();
};

// Appends a span, or extends the last span if the new one continues it. Does not allocate while the list has room.
void append(std::vector<device::AdamWSpan> &spans, const device::AdamWSpan &span) noexcept;
void append(std::vector<device::CompactSpan> &spans, const device::CompactSpan &span) noexcept;

// Rounds new weights of the parameter to bf16, starting at element `first`. Reads only `from`, `to` and `count` of
// `numbers`.
void round_randomly(const Runtime &runtime, const memory::ParamSpec &param, const device::RandomRounding &numbers,
                    uint64_t first, uint64_t step, device::Stream &caller);

}  // namespace fsdp::engine
