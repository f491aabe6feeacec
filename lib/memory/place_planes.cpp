// SPDX-License-Identifier: Apache-2.0
#include "memory/place_planes.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/checked.h"
#include "base/dtype.h"
#include "memory/home_plan.h"
#include "memory/plane.h"

namespace fsdp::memory {

uint64_t take(uint64_t &end, uint64_t bytes, const char *what, uint64_t alignment) {
  const uint64_t offset = round_up(end, alignment, what);
  end = checked_add(offset, bytes, what);
  return offset;
}

uint64_t take(RegionPlan &region, uint64_t bytes, uint64_t alignment) {
  return take(region.bytes, bytes, region.what, alignment);
}

bool is_whole(const ModelSpec &spec, const BucketPlan &bucket) {
  return spec.groups[bucket.group].strategy == FSDP_STRATEGY_NO_SHARD;
}

void place_kept(ModelPlan &plan, BucketPlan &bucket, PlanePlan plane, const char *what) {
  const bool in_file = plane.region == RegionId::home;
  RegionPlan &region = plan.region(plane.region, bucket.mesh);
  plane.offset = take(region, bucket.bytes(plane, what), in_file ? io_alignment : buffer_alignment);
  if (in_file) region.bytes = round_up(region.bytes, io_alignment, what);
  bucket.planes.push_back(plane);
}

RegionId region_at(fsdp_home home, RegionId on_device) {
  return home == FSDP_HOME_FILE ? RegionId::home : home == FSDP_HOME_HOST ? RegionId::host_home : on_device;
}

uint64_t grad_alignment(const ModelSpec &spec) { return spec.debug ? page_bytes : buffer_alignment; }

void place_full_grad(ModelPlan &plan, PartPlan &part, uint64_t offset) {
  part.full_grad.offset = offset;
  for (const uint32_t b : part.buckets)
    for (PlanePlan &plane : plan.buckets[b].planes)
      if (plane.kind == PlaneKind::full_grad || (plane.kind == PlaneKind::grad && plane.again)) {
        plane.region = part.full_grad.region;
        plane.offset = checked_add(plane.offset, offset, full_grads);
      }
}

namespace {

constexpr uint64_t staging_chunk_bytes = 256 * 1024;

RegionId choose_compute_region(const ModelSpec &spec, const GroupSpec &group) {
  const bool shards_params = group.strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
  if (group.strategy == FSDP_STRATEGY_NO_SHARD)
    return spec.shows_apart() ? RegionId::whole_compute : RegionId::local_compute;
  if (!spec.host_memory && !spec.communicates(spec.mesh_of(group))) return RegionId::local_compute;
  if (!spec.host_memory && shards_params) return RegionId::sharded_compute;
  return shards_params || spec.mapped(spec.mesh_of(group)) ? RegionId::mapped_compute : RegionId::whole_compute;
}

// Gives each turn its buffer, once the size of the largest part is known.
void part_turns(ModelPlan &plan) {
  for (BucketPlan &bucket : plan.buckets)
    for (PlanePlan &plane : bucket.planes)
      if (takes_turns(plane.kind)) plane.offset += plane.index * (plan.region(plane).bytes / partial_turns);
}

ScheduleSpec schedule_of(const ModelSpec &spec, const GradCut &cut, const ModelPlan &plan) {
  ScheduleSpec schedule;
  schedule.kind = spec.schedule;
  schedule.visits = spec.visits;
  schedule.prefetch_depth = spec.prefetch_depth;
  schedule.prefetch_bytes = spec.prefetch_bytes;
  schedule.pending_grads = cut.pending;
  schedule.held_groups = spec.held_groups;
  schedule.apart = spec.debug;
  schedule.groups.reserve(plan.groups.size());
  schedule.recompute = spec.plane_policy == FSDP_PLANES_BY_PHASE_AND_RECOMPUTE;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const GroupPlan &group = plan.groups[g];
    ScheduledGroup scheduled;
    scheduled.piece_count = static_cast<uint32_t>(group.pieces.size());
    scheduled.buffers.clear();
    const auto add_buffer = [&](uint64_t bytes) {
      scheduled.buffers.push_back({group.copies ? bytes : 0, group.gathers ? bytes : 0});
    };
    for (size_t p = 0; group.by_piece && p < group.pieces.size(); ++p) add_buffer(group.pieces[p].gathered_bytes);
    if (!group.by_piece) add_buffer(group.gathered_bytes());
    scheduled.grad_bytes.clear();
    for (const PartPlan &part : plan.parts_of(group))
      scheduled.grad_bytes.push_back(group.persistent_grad ? 0 : part.full_grad.bytes);
    scheduled.mesh = spec.groups[g].mesh;
    scheduled.resident = spec.groups[g].resident && !spec.debug;
    scheduled.root = spec.groups[g].root;
    scheduled.by_phase = group.by_phase;
    scheduled.trainable = group.trainable;
    scheduled.backward_weights = spec.groups[g].backward_weights;
    schedule.groups.push_back(scheduled);
  }
  return schedule;
}

// Adds the offset of the group's buffer to the offsets of planes in that buffer. If each gather chooses a free buffer,
// the planes keep the offsets in their buffer.
void place_gathered(ModelPlan &plan) {
  if (!plan.gather_pool.size_bytes || plan.visits.shared) return;
  for (BucketPlan &bucket : plan.buckets)
    for (PlanePlan &plane : bucket.planes)
      if (is_gathered(plane.kind))
        plane.offset += plan.gather_pool.offsets[plan.visits.key(bucket.group, bucket.piece, plane.slot)];
}

// Adds the gathered planes of one bucket to a buffer in which `end` bytes are in use. In a group by phase, each buffer
// has only one form of a parameter that is quantized in two forms.
void add_gathered(const GroupPlan &group, uint32_t slot, BucketPlan &bucket, uint64_t &end) {
  const bool by_phase = group.by_phase && bucket.forms() == 2;
  for (size_t i = 0, count = bucket.planes.size(); i < count; ++i) {
    const PlanePlan published = bucket.planes[i];
    if (!is_published(published.kind) || (by_phase && published.index != slot)) continue;
    PlanePlan gathered{
        .kind = gathered_from(published.kind), .index = published.index, .slot = static_cast<uint8_t>(slot)};
    gathered.dtype = published.dtype;
    gathered.region = RegionId::gathered;
    gathered.offset = take(end, bucket.bytes(gathered, "full weights"), "full weights");
    if (group.copies) bucket.planes.push_back(gathered);
  }
}

// In a buffer for the whole group the pieces follow each other, at the same offsets in the buffer of each slot.
void add_gathered(ModelPlan &plan, GroupPlan &group) {
  uint64_t begin = 0;
  for (PiecePlan &piece : group.pieces) {
    uint64_t longest = begin;
    for (uint32_t slot = 0; slot < group.slots; ++slot) {
      uint64_t end = begin;
      for (const uint32_t b : piece.buckets) add_gathered(group, slot, plan.buckets[b], end);
      longest = std::max(longest, end);
    }
    const bool last = &piece == &group.pieces.back();
    if (group.pieces.size() > 1 && !last) longest = round_up(longest, buffer_alignment, "full weights");
    piece.gathered_bytes = longest - begin;
    begin = group.by_piece ? 0 : longest;
  }
}

// Does a visit name a piece of the group? Then its pieces have buffers of their own.
bool is_by_piece(const ModelSpec &spec, uint32_t group) {
  return spec.groups[group].piece_count() > 1 && spec.schedule == FSDP_SCHEDULE_VISITS &&
         std::ranges::any_of(spec.visits,
                             [&](const fsdp_visit &visit) { return visit.group_index == group && visit.piece != 0; });
}

// The number of kinds of parameters. Parameters of one kind share the numbers of a step of AdamW.
uint64_t count_step_kinds(const ModelSpec &spec) {
  std::set<std::pair<double, bool>> kinds;
  for (const GroupSpec &group : spec.groups)
    for (const ParamSpec &param : group.params)
      if (!param.frozen()) kinds.insert({param.lr_scale, (param.flags & FSDP_PARAM_NO_DECAY) != 0});
  return kinds.size();
}

}  // namespace

void name_regions(ModelPlan &plan, size_t meshes) {
  using Id = RegionId;
  plan.regions.resize(meshes * region_count);
  const auto name = [&](Id id, fsdp_role role, const char *what, Reach reach = Reach::own) {
    for (uint32_t mesh = 0; mesh < (is_by_mesh(id) ? meshes : 1); ++mesh)
      plan.region(id, mesh) = {.id = id, .mesh = mesh, .role = role, .what = what, .reach = reach};
  };
  name(Id::mapped_compute, FSDP_ROLE_COMPUTE, "compute weights", Reach::common);
  name(Id::whole_compute, FSDP_ROLE_COMPUTE, "whole compute weights", Reach::parts);
  name(Id::sharded_compute, FSDP_ROLE_COMPUTE, "compute weights", Reach::parts);
  name(Id::local_compute, FSDP_ROLE_COMPUTE, "compute weights");
  name(Id::main, FSDP_ROLE_MAIN, "main weights");
  name(Id::optimizer, FSDP_ROLE_OPTIMIZER, "optimizer state");
  name(Id::host_home, FSDP_ROLE_HOME, "planes at home on the host");
  name(Id::home, FSDP_ROLE_HOME, "planes at home in a file");
  name(Id::turns, FSDP_ROLE_STAGING, "segments of a file");
  name(Id::grad_turns, FSDP_ROLE_STAGING, "main grads on their way to a file");
  name(Id::grad, FSDP_ROLE_GRAD, "main grads");
  name(Id::kept_grads, FSDP_ROLE_GRAD, full_grads, Reach::parts);
  name(Id::lent_grads, FSDP_ROLE_REDUCE, full_grads, Reach::parts);
  name(Id::gathered, FSDP_ROLE_GATHER, "gather pool");
  name(Id::partial, FSDP_ROLE_REDUCE, "partial sums");
  name(Id::rounded, FSDP_ROLE_REDUCE, "rounded gradients");
  name(Id::received, FSDP_ROLE_REDUCE, "gradients of all ranks");
  name(Id::norms, FSDP_ROLE_STAGING, "norms");
  name(Id::device_norms, FSDP_ROLE_STAGING, "norms of a device", Reach::parts);
  name(Id::amaxes, FSDP_ROLE_STAGING, "amaxes of parameters");
  name(Id::steps, FSDP_ROLE_STAGING, "the numbers of a step");
  name(Id::matrices, FSDP_ROLE_MATRIX, "matrices", Reach::parts);
  name(Id::file_rows, FSDP_ROLE_STAGING, "rows of matrices on their way to a file");
  name(Id::staging, FSDP_ROLE_STAGING, "staging", Reach::parts);
  name(Id::save_staging, FSDP_ROLE_STAGING, "checkpoints on their way to the disk");
  name(Id::messages, FSDP_ROLE_STAGING, "messages");
  name(Id::device_messages, FSDP_ROLE_STAGING, "messages of a device");
  for (const Id id : {Id::gathered, Id::rounded, Id::received}) plan.region(id).registered = true;
  // These regions are in host memory, because the calling thread reads measured norms and staged parameters.
  for (uint32_t mesh = 0; mesh < meshes; ++mesh)
    for (const Id id : {Id::staging, Id::grad_turns, Id::file_rows}) plan.region(id, mesh).on_host = true;
  plan.region(Id::norms).on_host = plan.region(Id::messages).on_host = true;
  plan.region(Id::save_staging).on_host = plan.region(Id::host_home).on_host = plan.region(Id::turns).on_host = true;
  plan.region(Id::messages).by_comm = plan.region(Id::device_messages).by_comm = true;
}

// Places the published planes of a piece's buckets one after the other.
void place_piece(const ModelSpec &spec, ModelPlan &plan, const GroupSpec &group, PiecePlan &piece) {
  piece.compute.region = choose_compute_region(spec, group);
  piece.compute.mesh = group.mesh;
  RegionPlan &region = plan.region(piece.compute.region, group.mesh);
  const bool sharded = piece.compute.region == RegionId::sharded_compute;
  uint64_t whole = 0, own = 0;
  for (const uint32_t b : piece.buckets) {
    BucketPlan &bucket = plan.buckets[b];
    for (PlanePlan plane : published_planes(bucket.dtype, bucket.quantization)) {
      plane.region = piece.compute.region;
      plane.extent = sharded ? Extent::group : Extent::whole;
      plane.owned = is_whole(spec, bucket) ? Extent::whole : Extent::group;
      plane.offset = take(whole, bucket.bytes(plane, region.what), region.what);
      bucket.planes.push_back(plane);
      PlanePlan part = plane;
      part.extent = Extent::group;
      own = checked_add(own, bucket.bytes(part, region.what), region.what);
    }
  }
  // A piece in a common region starts on a page, so that debug mode can take away exactly its pages, and a private
  // view's pages can be restored. In whole_compute this applies only if whole weights are shown in a separate view.
  const bool paged =
      region.reach == Reach::common || (spec.shows_apart() && piece.compute.region == RegionId::whole_compute);
  piece.compute.bytes = paged ? round_up(whole, page_bytes, region.what) : whole;
  piece.compute.offset = take(region, piece.compute.bytes, paged ? page_bytes : buffer_alignment);
  if (region.reach == Reach::common) region.own_bytes = checked_add(region.own_bytes, own, region.what);
  for (const uint32_t b : piece.buckets)
    for (PlanePlan &plane : plan.buckets[b].planes)
      if (is_published(plane.kind)) plane.offset = checked_add(plane.offset, piece.compute.offset, region.what);
}

void place_compute(const ModelSpec &spec, ModelPlan &plan, uint32_t g) {
  GroupPlan &group = plan.groups[g];
  group.by_piece = is_by_piece(spec, g);
  group.gathers =
      spec.groups[g].strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS && spec.communicates(spec.mesh_of(spec.groups[g]));
  group.copies = group.gathers && !spec.mapped(spec.mesh_of(spec.groups[g]));
  for (PiecePlan &piece : group.pieces) place_piece(spec, plan, spec.groups[g], piece);
  // This is the same on one rank, so that a program that runs on one rank also runs on many.
  group.parts_phases = spec.groups[g].strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS && !spec.groups[g].resident &&
                       spec.plane_policy != FSDP_PLANES_BOTH && has_forms(spec.groups[g]);
  group.by_phase = group.gathers && group.parts_phases;
  group.slots = gather_slots(spec.schedule, group.by_phase, spec.groups[g].backward_weights);
  add_gathered(plan, group);
}

// If the optimizer works directly on the compute weights (fp32, or bf16 with or without a rest), this rank's part of
// the compute weights is its main weights.
void place_main(const ModelSpec &spec, ModelPlan &plan, BucketPlan &bucket, Extent extent) {
  const RegionId region = region_at(spec.homes.main, RegionId::main);
  PlanePlan main{.kind = PlaneKind::main, .extent = extent, .owned = extent, .region = region};
  if (bucket.plane(PlaneKind::compute).dtype != FSDP_FLOAT32 && bucket.main_storage == FSDP_MAIN_FLOAT32)
    return place_kept(plan, bucket, main, "main weights");
  main = bucket.plane(PlaneKind::compute);
  main.kind = PlaneKind::main, main.owned = extent, main.again = true;
  bucket.planes.push_back(main);
  if (bucket.main_storage == FSDP_MAIN_SPLIT16)
    place_kept(plan, bucket,
               {.kind = PlaneKind::rest, .dtype = FSDP_BFLOAT16, .extent = extent, .owned = extent, .region = region},
               "rests of main weights");
}

void place_optimizer_planes(const ModelSpec &spec, ModelPlan &plan, BucketPlan &bucket) {
  if (bucket.frozen) return;
  const Extent extent = is_whole(spec, bucket) ? Extent::whole : Extent::shard;
  place_main(spec, plan, bucket, extent);
  const RegionId region = region_at(spec.homes.state, RegionId::optimizer);
  for (uint16_t s = 0; s < spec.states.size(); ++s) {
    if (!spec.has_state(spec.groups[bucket.group].params[bucket.params.front()], spec.states[s])) continue;
    const bool coded = bucket.coded_states && s < adamw_states;
    PlanePlan state{.kind = PlaneKind::state, .index = s, .extent = extent, .owned = extent, .region = region};
    state.dtype = coded ? FSDP_UINT8 + 0 : spec.states[s].dtype;
    place_kept(plan, bucket, state, "optimizer state");
    if (!coded) continue;
    state.kind = PlaneKind::state_scales, state.dtype = FSDP_FLOAT32;
    // The scales have a sixty-fourth of the codes' bytes, and their part of a segment would not be whole pages.
    if (region == RegionId::home) state.region = RegionId::optimizer;
    place_kept(plan, bucket, state, "scales of optimizer state");
  }
}

namespace {

// Calls `visit` with each part of the mesh whose full gradients are in the pool, and with the part's offset in the
// pool.
template <class Visit>
void for_each_lent(ModelPlan &plan, uint32_t mesh, Visit &&visit) {
  for (size_t p = 0; p < plan.parts.size(); ++p)
    if (const GroupPlan &group = plan.groups[plan.parts[p].group];
        group.trainable && !group.persistent_grad && plan.parts[p].full_grad.mesh == mesh)
      visit(plan.parts[p], plan.grad_pool.offsets[p]);
}

// Places the mesh's share of the pool of full gradients, after its kept gradients in the same arena. Each mesh is a
// track of the pool's plan, so its buffers lie next to each other.
void place_grad_pool(const ModelSpec &spec, ModelPlan &plan, uint32_t mesh) {
  uint64_t begin = UINT64_MAX, end = 0;
  for_each_lent(plan, mesh, [&](const PartPlan &part, uint64_t offset) {
    if (part.full_grad.bytes == 0) return;
    begin = std::min(begin, offset);
    end = std::max(end,
                   checked_add(offset, round_up(part.full_grad.bytes, grad_alignment(spec), full_grads), full_grads));
  });
  const uint64_t size = end > begin ? end - begin : 0;
  const uint64_t kept = plan.region(RegionId::kept_grads, mesh).bytes;
  uint64_t part_end = kept;
  const uint64_t pool = take(part_end, size, full_grads, grad_alignment(spec)) - kept;
  plan.region(RegionId::lent_grads, mesh).bytes = round_up(part_end, page_bytes, full_grads) - kept;
  for_each_lent(plan, mesh, [&](PartPlan &part, uint64_t offset) {
    place_full_grad(plan, part, part.full_grad.bytes ? checked_add(pool, offset - begin, full_grads) : pool);
  });
}

}  // namespace

void place_pools(const ModelSpec &spec, const GradCut &cut, ModelPlan &plan) {
  part_turns(plan);
  plan.visits = build_visit_order(schedule_of(spec, cut, plan));
  plan.pending_grads = cut.pending + (spec.max_pending_bytes ? plan.visits.open_grads : 0);
  plan_part("the pool of gathered weights",
            [&] { plan.gather_pool = plan_pool(plan.visits.gathered, buffer_alignment); });
  plan_part("the pool of full gradients", [&] { plan.grad_pool = plan_pool(plan.visits.grads, grad_alignment(spec)); });
  plan.region(RegionId::gathered).bytes = plan.gather_pool.size_bytes;
  place_gathered(plan);
  for (uint32_t mesh = 0; mesh < spec.meshes.size(); ++mesh) place_grad_pool(spec, plan, mesh);
}

// The region has this rank's amaxes, the amaxes of all ranks that hold slots, the scales and their inverses. Ranks in
// host memory exchange their amaxes when they synchronize; ranks in device memory read each other's.
void size_amaxes(const ModelSpec &spec, ModelPlan &plan) {
  for (const BucketPlan &bucket : plan.buckets)
    if (!bucket.frozen && scales_whole_tensors(bucket.quantization)) plan.amax_count += bucket.params.size();
  if (!plan.amax_count) return;
  RegionPlan &region = plan.region(RegionId::amaxes);
  const uint64_t told = checked_multiply(std::min(plan.amax_count, amax_chunk), spec.value_count(), region.what);
  region.bytes = checked_multiply(checked_add(3 * plan.amax_count, told, region.what), sizeof(float), region.what);
  if (spec.host_memory) return;
  region.reach = Reach::parts;
  region.bytes = round_up(region.bytes, page_bytes, region.what);
}

uint64_t count_quantized(const ModelPlan &plan) {
  uint64_t count = 0;
  for (const BucketPlan &bucket : plan.buckets)
    if (bucket.quantization && !bucket.frozen) count += bucket.params.size();
  return count;
}

void size_scratch(const ModelSpec &spec, ModelPlan &plan) {
  for (RegionPlan &region : plan.regions)
    if (region.id == RegionId::whole_compute || region.id == RegionId::sharded_compute)
      region.bytes = round_up(region.bytes, page_bytes, region.what);
  const auto norms_of = [&](uint64_t values_of_a_slot) {
    const uint64_t values = checked_multiply(values_of_a_slot, spec.value_count(), "norms");
    const uint64_t bytes = checked_multiply(checked_add(plan.param_count, values, "norms"), sizeof(double), "norms");
    return checked_add(norm_head_bytes, bytes, "norms");
  };
  size_amaxes(spec, plan);
  plan.quantized_count = count_quantized(plan);
  plan.region(RegionId::norms).bytes = checked_add(norms_of(norm_chunk), nonfinite_bytes(plan), "norms");
  const uint64_t on_device = checked_add(norms_of(1), nonfinite_count_bytes(plan), "norms");
  plan.region(RegionId::device_norms).bytes = spec.host_memory ? 0 : round_up(on_device, page_bytes, "norms");
  plan.region(RegionId::steps).bytes = spec.host_memory ? 0 : count_step_kinds(spec) * adamw_step_bytes;
  plan.region(RegionId::save_staging).bytes = spec.save_staging_bytes;
  plan.region(RegionId::turns).bytes =
      checked_multiply(turn_bytes_of(spec, plan), spec.homes.turns, plan.region(RegionId::turns).what);
  plan.region(RegionId::messages).bytes = spec.message_bytes;
  plan.region(RegionId::device_messages).bytes = spec.device_team_bytes;
  for (uint32_t mesh = 0; mesh < spec.meshes.size(); ++mesh)
    plan.region(RegionId::staging, mesh).bytes =
        spec.communicates(spec.meshes[mesh]) || spec.meshes[mesh].size() > 1 ? staging_chunk_bytes : 0;
}

uint64_t nonfinite_count_bytes(const ModelPlan &plan) { return plan.quantized_count * sizeof(uint64_t); }

uint64_t nonfinite_bytes(const ModelPlan &plan) {
  return nonfinite_count_bytes(plan) + round_up(plan.amax_count * sizeof(float), 8, "amaxes");
}

}  // namespace fsdp::memory
