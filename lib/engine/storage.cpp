// SPDX-License-Identifier: Apache-2.0
#include "engine/storage.h"

#include <new>

#include "base/checked.h"
#include "base/dtype.h"

namespace fsdp::engine {
namespace {

const char *role_name(fsdp_role role) {
  switch (role) {
    case FSDP_ROLE_COMPUTE: return "compute weights";
    case FSDP_ROLE_MAIN: return "main weights";
    case FSDP_ROLE_GRAD: return "main grads";
    case FSDP_ROLE_OPTIMIZER: return "optimizer state";
    case FSDP_ROLE_GATHER: return "gather pool";
    case FSDP_ROLE_REDUCE: return "full gradients";
    default: return "staging";
  }
}

}  // namespace

std::optional<Error> catch_error(const std::function<void()> &body) {
  try {
    body();
    return {};
  } catch (const Error &error) {
    return error;
  } catch (const std::bad_alloc &) {
    return Error(FSDP_OUT_OF_MEMORY, "the heap is exhausted");
  } catch (const std::exception &error) {
    return Error(FSDP_INTERNAL, error.what());
  }
}

void share_outcome(comm::Team &team, const std::optional<Error> &mine) {
  std::string message;
  if (mine) message = format_text("{:02}{}", mine->status, mine->message);
  const auto all = team.exchange(std::as_bytes(std::span(message)), "fsdp_seal_model");
  if (mine) throw *mine;
  for (uint32_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    const std::string_view text(reinterpret_cast<const char *>(all[r].data()), all[r].size());
    fail_rank((text[0] - '0') * 10 + (text[1] - '0'), static_cast<int32_t>(team.world_rank(r)), "rank {}: {}",
              team.world_rank(r), text.substr(2));
  }
}

std::byte *Plane::at(const layout::Slice &slice) const {
  const uint64_t offset = extent == Extent::whole   ? slice.full_offset
                          : extent == Extent::group ? slice.group_offset
                                                    : slice.shard_offset;
  return data + offset * dtype_size(dtype);
}

Storage::Storage(const memory::ModelSpec &spec, const memory::ModelPlan &plan,
                 const std::map<fsdp_role, CallerArena> &callers, const Teams &teams, device::Device &device,
                 std::optional<Error> early)
    : spec_(spec),
      plan_(plan),
      callers_(callers),
      host_team_(*teams.inner),
      team_(*teams.inner_data),
      device_(device) {
  // Private memory first: a rank that cannot have it must say so before the others wait for it in a collective.
  if (!early) early = catch_error([this] { allocate_private(); });
  share_outcome(*teams.all, early);
  // The ranks of one inner axis fail alike; those of another must learn it.
  if (spec_.mesh.outer_size == 1) allocate_shared();
  else share_outcome(*teams.all, catch_error([this] { allocate_shared(); }));
  buckets_.resize(plan_.buckets.size());
  for (uint32_t b = 0; b < buckets_.size(); ++b) place(b);
  for (int role = 1; role < 8; ++role) allocated_[0] += allocated_[role];
}

Storage::Region Storage::allocate(fsdp_role role, uint64_t bytes) {
  if (bytes == 0) return {};
  Region region;
  if (const auto caller = callers_.find(role); caller != callers_.end()) {
    if (caller->second.size_bytes < bytes)
      fail(FSDP_INVALID_ARGUMENT, "fsdp_set_arena: the arena for {} has {} bytes, the model needs {} on rank {}",
           role_name(role), caller->second.size_bytes, bytes, team_.world_rank(team_.rank()));
    region.data = caller->second.data;
    clear(region.data, bytes);
  } else {
    // Norms are measured where the caller's thread can read them.
    region.memory = role == FSDP_ROLE_STAGING ? device_.allocate_host(bytes, role_name(role)) : device_.allocate(bytes, role_name(role));
    region.data = region.memory->data();
  }
  allocated_[static_cast<size_t>(role)] += bytes;
  return region;
}

void Storage::clear(std::byte *data, uint64_t bytes) {
  device::Stream &stream = device_.caller_stream(nullptr);
  stream.fill(data, 0, bytes);
  const auto cleared = device_.create_event();
  stream.record(*cleared);
  device_.synchronize(*cleared);
}

void Storage::allocate_private() {
  if (callers_.contains(FSDP_ROLE_GRAD) && plan_.persistent_grad_bytes)
    fail(FSDP_UNSUPPORTED, "fsdp_set_arena: main grads of groups with FSDP_NO_SHARD or FSDP_REDUCE_LAST lie in memory that "
                           "peers map; FSDP_ROLE_GRAD cannot be handed in for this model");
  local_compute_ = allocate(FSDP_ROLE_COMPUTE, plan_.local_compute_bytes);
  main_ = allocate(FSDP_ROLE_MAIN, plan_.main_bytes);
  grad_ = allocate(FSDP_ROLE_GRAD, plan_.grad_bytes);
  optimizer_ = allocate(FSDP_ROLE_OPTIMIZER, plan_.optimizer_bytes);
  gather_ = allocate(FSDP_ROLE_GATHER, plan_.gather_bytes);
  scratch_ = allocate(FSDP_ROLE_STAGING, plan_.staging_bytes);
  partial_ = allocate(FSDP_ROLE_REDUCE, plan_.partial_bytes);
  if (plan_.step_bytes) steps_ = device_.allocate(plan_.step_bytes, "the numbers of a step");
  allocated_[FSDP_ROLE_STAGING] += plan_.step_bytes;
  wire_ = allocate(FSDP_ROLE_REDUCE, plan_.wire_bytes);
}

void Storage::register_with(comm::Team &team) const {
  if (plan_.gather_bytes) team.register_memory(gather_.data, plan_.gather_bytes, role_name(FSDP_ROLE_GATHER));
  if (plan_.wire_bytes) team.register_memory(wire_.data, plan_.wire_bytes, role_name(FSDP_ROLE_REDUCE));
}

void Storage::allocate_shared() {
  shared_compute_ = create_shared_compute();
  whole_compute_ = create_parts(team_, plan_.whole_compute_bytes, "whole compute weights");
  shard_compute_ = create_parts(team_, plan_.shard_compute_bytes, "compute weights");
  grads_ = create_parts(team_, plan_.grads_part_bytes, "full gradients");
  staging_ = create_parts(host_team_, plan_.staging_part_bytes, "staging");
  if (shard_compute_) allocated_[FSDP_ROLE_COMPUTE] += shard_compute_->size_bytes() / team_.size();
  if (whole_compute_) allocated_[FSDP_ROLE_COMPUTE] += whole_compute_->size_bytes() / team_.size();
  if (grads_) {
    allocated_[FSDP_ROLE_GRAD] += plan_.persistent_grad_bytes;
    allocated_[FSDP_ROLE_REDUCE] += grads_->size_bytes() / team_.size() - plan_.persistent_grad_bytes;
  }
  allocated_[FSDP_ROLE_STAGING] += plan_.message_bytes + plan_.device_team_bytes;  // the outer axis and the device's teams make it
  if (staging_) allocated_[FSDP_ROLE_STAGING] += staging_->size_bytes() / team_.size();
}

// Each rank writes its slices of every sub-bucket; whoever is first also counts what belongs to nobody.
std::unique_ptr<comm::Arena> Storage::create_shared_compute() {
  if (plan_.shared_compute_bytes == 0) return nullptr;
  std::vector<comm::Range> own;
  uint64_t own_bytes = 0;
  for (const memory::BucketPlan &bucket : plan_.buckets) {
    if (plan_.groups[bucket.group].home != memory::ComputeHome::shared) continue;
    const uint64_t element = dtype_size(bucket.dtype);
    for (const layout::SubBucket &sub : bucket.layout.sub_buckets) {
      if (sub.shard_count == 0) continue;
      const uint64_t count = sub.shard_count * bucket.slices;
      own.push_back({bucket.compute_offset + (sub.full_offset + team_.rank() * count) * element, count * element});
      own_bytes += count * element;
    }
  }
  auto arena = team_.create_arena(plan_.shared_compute_bytes, own, "compute weights");
  allocated_[FSDP_ROLE_COMPUTE] += own_bytes + (team_.rank() == 0 ? arena->size_bytes() - own_bytes * team_.size() : 0);
  return arena;
}

std::unique_ptr<comm::Arena> Storage::create_parts(comm::Team &team, uint64_t part_bytes, const char *what) {
  if (part_bytes == 0) return nullptr;
  return team.create_parts(part_bytes, what);
}

void Storage::place_compute(const memory::BucketPlan &plan, const memory::GroupPlan &group, Bucket &bucket) const {
  bucket.compute.dtype = plan.dtype;
  bucket.compute.extent = Extent::whole;
  switch (group.home) {
    case memory::ComputeHome::shared:
      bucket.compute.data = shared_compute_->writable() + plan.compute_offset;
      bucket.compute_source = {shared_compute_.get(), plan.compute_offset, 0};
      if (!group.copies) bucket.view = shared_compute_->data() + plan.compute_offset;
      break;
    case memory::ComputeHome::whole: {
      const uint64_t own = team_.rank() * plan_.whole_compute_bytes;
      bucket.compute.data = whole_compute_->writable() + own + plan.compute_offset;
      bucket.compute_source = {whole_compute_.get(), plan.compute_offset, plan_.whole_compute_bytes};
      bucket.view = whole_compute_->data() + own + plan.compute_offset;
      break;
    }
    case memory::ComputeHome::shard:
      bucket.compute.extent = Extent::group;
      bucket.compute.data = shard_compute_->writable() + team_.rank() * plan_.shard_compute_bytes + plan.compute_offset;
      bucket.compute_source = {shard_compute_.get(), plan.compute_offset, plan_.shard_compute_bytes};
      break;
    case memory::ComputeHome::local:
      bucket.compute.data = local_compute_.data + plan.compute_offset;
      bucket.view = bucket.compute.data;
      break;
  }
}

void Storage::place_grads(const memory::BucketPlan &plan, const memory::GroupPlan &group, Bucket &bucket) const {
  std::byte *own = grads_->writable() + team_.rank() * plan_.grads_part_bytes;
  const uint64_t full = group.full_grad_offset + plan.full_grad_offset;
  bucket.full_grad = own + full;
  bucket.full_grad_source = {grads_.get(), full, plan_.grads_part_bytes};
  if (plan.grad_is_full) {
    bucket.grad = {own + full, FSDP_FLOAT32, Extent::whole};
    bucket.whole_grad_source = bucket.full_grad_source;
  } else if (plan.main_is_whole) {
    bucket.grad = {own + plan.grad_offset, FSDP_FLOAT32, Extent::whole};
    bucket.whole_grad_source = {grads_.get(), plan.grad_offset, plan_.grads_part_bytes};
  } else {
    bucket.grad = {grad_.data + plan.grad_offset, FSDP_FLOAT32, plan.grad_is_grouped ? Extent::group : Extent::shard};
  }
}

void Storage::place(uint32_t index) {
  const memory::BucketPlan &plan = plan_.buckets[index];
  const memory::GroupPlan &group = plan_.groups[plan.group];
  Bucket &bucket = buckets_[index];
  bucket.plan = &plan;
  if (plan.layout.full_count == 0) return;
  place_compute(plan, group, bucket);
  if (plan.frozen) return;
  const Extent extent = plan.main_is_whole ? Extent::whole : Extent::shard;
  bucket.main = plan.main_is_compute ? bucket.compute : Plane{main_.data + plan.main_offset, FSDP_FLOAT32, extent};
  place_grads(plan, group, bucket);
  for (uint32_t turn = 0; turn < 2 && plan.uses_partial; ++turn)
    bucket.partial[turn] =
        reinterpret_cast<float *>(partial_.data + turn * (plan_.partial_bytes / 2) + plan.partial_offset);
  if (plan_.wire_bytes && plan.wire_dtype != plan.grad_dtype) bucket.wire = wire_.data + plan.wire_offset;
  for (size_t s = 0; s < plan.state_offsets.size(); ++s)
    bucket.states.push_back({optimizer_.data + plan.state_offsets[s], spec_.states[s].dtype, extent});
}

}  // namespace fsdp::engine
