// SPDX-License-Identifier: Apache-2.0
#include "memory/model_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/checked.h"
#include "base/dtype.h"

namespace fsdp::memory {
namespace {

constexpr uint64_t staging_chunk_bytes = 256 * 1024;
constexpr uint64_t partial_count = 2;
constexpr uint64_t step_size = 32;  // of device::AdamW, with room

// Takes `bytes` from the end of a region, aligned; returns where they start.
uint64_t take(uint64_t &region, uint64_t bytes, uint64_t alignment = buffer_alignment) {
  const uint64_t offset = round_up(region, alignment, "memory plan");
  region = checked_add(offset, bytes, "memory plan");
  return offset;
}

uint64_t bytes_of(uint64_t count, fsdp_dtype dtype) {
  return checked_multiply(count, dtype_size(dtype), "memory plan");
}

BucketPlan make_bucket(const ModelSpec &spec, uint32_t group_index, std::vector<uint32_t> params) {
  const GroupSpec &group = spec.groups[group_index];
  const ParamSpec &first = group.params[params.front()];
  BucketPlan bucket;
  bucket.group = group_index;
  bucket.dtype = first.dtype;
  bucket.frozen = first.frozen();
  bucket.grad_dtype = group.grad_dtype ? group.grad_dtype : first.dtype;
  bucket.wire_dtype = group.reduce_dtype ? group.reduce_dtype : bucket.grad_dtype;
  bucket.main_is_compute = first.dtype == FSDP_FLOAT32;
  bucket.main_is_whole = group.strategy == FSDP_NO_SHARD;
  bucket.grad_is_full = group.reduce_policy == FSDP_REDUCE_LAST && bucket.grad_dtype == FSDP_FLOAT32;
  std::vector<layout::TensorSpec> tensors;
  for (const uint32_t index : params) tensors.push_back(group.params[index].tensor());
  bucket.layout = layout::build_flat_layout(tensors, spec.mesh.slots());
  bucket.slices = spec.mesh.slices();
  const bool sharded = !bucket.frozen && !bucket.grad_is_full;
  bucket.grad_is_grouped = sharded && !bucket.main_is_whole && spec.mesh.outer == layout::OuterAxis::optim;
  bucket.uses_partial = sharded && spec.mesh.outer == layout::OuterAxis::shard;
  bucket.params = std::move(params);
  return bucket;
}

// One bucket for each (dtype, trainability) of the group, in order of first appearance.
void split_group(const ModelSpec &spec, uint32_t group_index, ModelPlan &plan) {
  const GroupSpec &group = spec.groups[group_index];
  std::vector<std::pair<std::pair<fsdp_dtype, bool>, std::vector<uint32_t>>> kinds;
  for (uint32_t i = 0; i < group.params.size(); ++i) {
    const std::pair kind{group.params[i].dtype, group.params[i].frozen()};
    auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto &entry) { return entry.first == kind; });
    if (found == kinds.end()) found = kinds.insert(kinds.end(), {kind, {}});
    found->second.push_back(i);
  }
  for (auto &[kind, params] : kinds) {
    plan.groups[group_index].buckets.push_back(static_cast<uint32_t>(plan.buckets.size()));
    plan.buckets.push_back(make_bucket(spec, group_index, std::move(params)));
  }
}

ComputeHome choose_home(const ModelSpec &spec, const GroupSpec &group) {
  if (group.strategy == FSDP_NO_SHARD) return ComputeHome::local;
  if (!spec.host_memory && !spec.communicates()) return ComputeHome::local;
  if (!spec.host_memory && group.strategy == FSDP_OPTIM_GRADS_PARAMS) return ComputeHome::shard;
  if (group.strategy == FSDP_OPTIM_GRADS_PARAMS || spec.mapped()) return ComputeHome::shared;
  return ComputeHome::whole;
}

uint64_t &compute_region(ModelPlan &plan, ComputeHome home) {
  switch (home) {
    case ComputeHome::shared: return plan.shared_compute_bytes;
    case ComputeHome::whole: return plan.whole_compute_bytes;
    case ComputeHome::shard: return plan.shard_compute_bytes;
    default: return plan.local_compute_bytes;
  }
}

void place_compute(const ModelSpec &spec, ModelPlan &plan, uint32_t g) {
  GroupPlan &group = plan.groups[g];
  group.home = choose_home(spec, spec.groups[g]);
  group.gathers = spec.groups[g].strategy == FSDP_OPTIM_GRADS_PARAMS && spec.communicates();
  group.copies = group.gathers && !spec.mapped();
  uint64_t size = 0, home = 0;
  for (const uint32_t b : group.buckets) {
    BucketPlan &bucket = plan.buckets[b];
    bucket.gathered_offset = take(size, bytes_of(bucket.layout.full_count, bucket.dtype));
    const uint64_t kept = group.home == ComputeHome::shard ? bucket.inner_count() : bucket.layout.full_count;
    bucket.compute_offset = take(home, bytes_of(kept, bucket.dtype));
  }
  group.gathered_bytes = size;
  // A shared group starts on a page, so that debug mode can take its pages away alone.
  const bool shared = group.home == ComputeHome::shared;
  group.compute_bytes = shared ? round_up(home, page_bytes) : home;
  group.compute_offset =
      take(compute_region(plan, group.home), group.compute_bytes, shared ? page_bytes : buffer_alignment);
  for (const uint32_t b : group.buckets) {
    BucketPlan &bucket = plan.buckets[b];
    bucket.compute_offset += group.compute_offset;
    if (shared) plan.shared_compute_own_bytes += bytes_of(bucket.inner_count(), bucket.dtype);
  }
}

void place_optimizer_state(const ModelSpec &spec, ModelPlan &plan, BucketPlan &bucket) {
  if (bucket.frozen) return;
  const uint64_t count = bucket.main_count();
  if (!bucket.main_is_compute) bucket.main_offset = take(plan.main_bytes, bytes_of(count, FSDP_FLOAT32));
  for (const StateSpec &state : spec.states)
    bucket.state_offsets.push_back(take(plan.optimizer_bytes, bytes_of(count, state.dtype)));
}

// Persistent full gradients and whole main grads come first in the rank's part of the grads arena, then the pool.
void place_grads(const ModelSpec &spec, ModelPlan &plan, uint32_t g) {
  GroupPlan &group = plan.groups[g];
  group.trainable = spec.groups[g].trainable();
  group.persistent_grad = group.trainable && spec.groups[g].reduce_policy == FSDP_REDUCE_LAST;
  uint64_t size = 0;
  for (const uint32_t b : group.buckets) {
    BucketPlan &bucket = plan.buckets[b];
    if (bucket.frozen) continue;
    bucket.full_grad_offset = take(size, bytes_of(bucket.layout.full_count, bucket.grad_dtype));
    if (bucket.grad_is_full) continue;
    uint64_t &region = bucket.main_is_whole ? plan.persistent_grad_bytes : plan.grad_bytes;
    bucket.grad_offset = take(region, bytes_of(bucket.grad_count(), FSDP_FLOAT32));
  }
  group.full_grad_bytes = size;
  uint64_t partial = 0;
  for (const uint32_t b : group.buckets)
    if (BucketPlan &bucket = plan.buckets[b]; bucket.uses_partial)
      bucket.partial_offset = take(partial, bytes_of(bucket.inner_count(), FSDP_FLOAT32));
  plan.partial_bytes = std::max(plan.partial_bytes, partial_count * round_up(partial, buffer_alignment, "memory plan"));
  if (group.persistent_grad) group.full_grad_offset = take(plan.persistent_grad_bytes, size);
}

// Where the communicator rounds gradients before it sends them.
void place_rounded(const ModelSpec &spec, ModelPlan &plan, uint32_t g) {
  if (!spec.rounds_before_sending || !spec.communicates()) return;
  uint64_t size = 0;
  for (const uint32_t b : plan.groups[g].buckets) {
    BucketPlan &bucket = plan.buckets[b];
    if (bucket.frozen || bucket.wire_dtype == bucket.grad_dtype) continue;
    bucket.wire_offset = take(size, bytes_of(bucket.layout.full_count, bucket.wire_dtype));
  }
  plan.wire_bytes = std::max(plan.wire_bytes, round_up(size, buffer_alignment, "memory plan"));
}

ScheduleSpec schedule_of(const ModelSpec &spec, const ModelPlan &plan) {
  ScheduleSpec schedule;
  schedule.kind = spec.schedule;
  schedule.visits = spec.visits;
  schedule.prefetch_depth = spec.prefetch_depth;
  schedule.prefetch_bytes = spec.prefetch_bytes;
  schedule.max_pending_groups = spec.max_pending_groups;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const GroupPlan &group = plan.groups[g];
    ScheduledGroup scheduled;
    scheduled.gathered_bytes = group.copies ? group.gathered_bytes : 0;
    scheduled.prefetch_bytes = group.gathers ? group.gathered_bytes : 0;
    scheduled.grad_bytes = group.trainable && !group.persistent_grad ? group.full_grad_bytes : 0;
    scheduled.resident = spec.groups[g].resident;
    scheduled.trainable = group.trainable;
    schedule.groups.push_back(scheduled);
  }
  return schedule;
}

void place_pools(const ModelSpec &spec, ModelPlan &plan) {
  plan.visits = build_visit_order(schedule_of(spec, plan));
  plan.gather_pool = plan_pool(plan.visits.gathered, buffer_alignment);
  plan.grad_pool = plan_pool(plan.visits.grads, buffer_alignment);
  plan.gather_bytes = plan.gather_pool.size_bytes;
  uint64_t part = plan.persistent_grad_bytes;
  plan.grad_pool_offset = take(part, plan.grad_pool.size_bytes);
  plan.grads_part_bytes = round_up(part, page_bytes);
  for (size_t g = 0; g < plan.groups.size(); ++g)
    if (plan.groups[g].trainable && !plan.groups[g].persistent_grad)
      plan.groups[g].full_grad_offset = plan.grad_pool_offset + plan.grad_pool.offsets[g];
}

// Parameters of one kind share the numbers of a step of AdamW.
uint64_t count_step_kinds(const ModelSpec &spec) {
  std::set<std::pair<double, bool>> kinds;
  for (const GroupSpec &group : spec.groups)
    for (const ParamSpec &param : group.params)
      if (!param.frozen()) kinds.insert({param.lr_scale, (param.flags & FSDP_PARAM_NO_DECAY) != 0});
  return kinds.size();
}

void sum_up(const ModelSpec &spec, ModelPlan &plan) {
  for (const auto &group : spec.groups) plan.param_count += group.params.size();
  for (const BucketPlan &bucket : plan.buckets) {
    plan.element_count += bucket.layout.used_count;
    plan.padding_count += bucket.layout.full_count - bucket.layout.used_count;
    plan.layout_hash = plan.layout_hash * 0x9E3779B97F4A7C15ull + bucket.layout.hash;
  }
  plan.whole_compute_bytes = round_up(plan.whole_compute_bytes, page_bytes);
  plan.shard_compute_bytes = round_up(plan.shard_compute_bytes, page_bytes);
  const uint64_t norms = checked_multiply(norm_chunk, spec.mesh.slots(), "memory plan");
  plan.staging_bytes =
      checked_multiply(checked_add(plan.param_count, norms, "memory plan"), sizeof(double), "memory plan");
  plan.step_bytes = spec.host_memory ? 0 : count_step_kinds(spec) * step_size;
  plan.message_bytes = spec.message_bytes;
  plan.device_team_bytes = spec.device_team_bytes;
  plan.staging_part_bytes = spec.communicates() || spec.mesh.size() > 1 ? staging_chunk_bytes : 0;
}

}  // namespace

std::array<uint64_t, 8> ModelPlan::role_bytes(uint32_t rank, uint32_t ranks) const {
  std::array<uint64_t, 8> bytes{};
  // What nobody writes of the shared arena (the rest of its last pages) is counted once, on rank 0.
  const uint64_t rest = shared_compute_bytes - shared_compute_own_bytes * ranks;
  bytes[FSDP_ROLE_COMPUTE] = shared_compute_own_bytes + (rank == 0 ? rest : 0) + whole_compute_bytes +
                             shard_compute_bytes + local_compute_bytes;
  bytes[FSDP_ROLE_MAIN] = main_bytes;
  bytes[FSDP_ROLE_GRAD] = grad_bytes + persistent_grad_bytes;
  bytes[FSDP_ROLE_OPTIMIZER] = optimizer_bytes;
  bytes[FSDP_ROLE_GATHER] = gather_bytes;
  bytes[FSDP_ROLE_REDUCE] = grads_part_bytes - persistent_grad_bytes + partial_bytes + wire_bytes;
  bytes[FSDP_ROLE_STAGING] = staging_bytes + step_bytes + staging_part_bytes + message_bytes + device_team_bytes;
  for (int role = 1; role < 8; ++role) bytes[0] += bytes[role];
  return bytes;
}

ModelPlan plan_model(const ModelSpec &spec) {
  ModelPlan plan;
  plan.groups.resize(spec.groups.size());
  for (uint32_t g = 0; g < spec.groups.size(); ++g) {
    split_group(spec, g, plan);
    place_compute(spec, plan, g);
    place_grads(spec, plan, g);
    place_rounded(spec, plan, g);
  }
  for (BucketPlan &bucket : plan.buckets) place_optimizer_state(spec, plan, bucket);
  place_pools(spec, plan);
  sum_up(spec, plan);
  return plan;
}

}  // namespace fsdp::memory
