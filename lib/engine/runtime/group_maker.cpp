// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/group_maker.h"

#include <algorithm>

#include "base/dtype.h"

namespace fsdp::engine {
namespace {

// Lists, for each request of a pool, the other requests with overlapping bytes. The requests are sorted by offset, and
// each is compared with those that start inside it.
std::vector<std::vector<uint32_t>> find_overlaps(const memory::PoolPlan &pool,
                                                 std::span<const memory::PoolRequest> requests) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < requests.size(); ++i)
    if (requests[i].bytes) order.push_back(i);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return std::pair(pool.offsets[a], a) < std::pair(pool.offsets[b], b); });
  std::vector<std::vector<uint32_t>> overlaps(requests.size());
  for (size_t a = 0; a < order.size(); ++a) {
    const uint64_t end = pool.offsets[order[a]] + requests[order[a]].bytes;
    for (size_t b = a + 1; b < order.size() && pool.offsets[order[b]] < end; ++b) {
      overlaps[order[a]].push_back(order[b]);
      overlaps[order[b]].push_back(order[a]);
    }
  }
  return overlaps;
}

// Returns NULL if the bucket does not have this plane.
std::byte *place_in(PlaneKind kind, const Bucket &bucket, const layout::SubBucket &sub) {
  return bucket.has(kind) ? bucket.plane(kind).element(sub.full_offset) : nullptr;
}

}  // namespace

void GroupMaker::make_groups() {
  runtime_.groups.resize(runtime_.plan.groups.size());
  runtime_.parts.resize(runtime_.plan.parts.size());
  for (uint32_t g = 0; g < runtime_.groups.size(); ++g) {
    Group &group = runtime_.groups[g];
    group.index = g;
    group.spec = &runtime_.spec.groups[g];
    group.plan = &runtime_.plan.groups[g];
    group.flight_name = runtime_.context.flight().keep(group.spec->name);
    if (runtime_.timeline) group.trace_name = runtime_.timeline->keep(group.spec->name);
    group.places.resize(group.spec->params.size());
    for (const uint32_t b : group.plan->buckets)
      for (uint32_t t = 0; t < runtime_.plan.buckets[b].params.size(); ++t)
        group.places[runtime_.plan.buckets[b].params[t]] = {
            .bucket = b, .tensor = t, .piece = runtime_.plan.buckets[b].piece};
    make_slots(group);
    make_grads(group);
    make_refresh(group);
  }
  if (!runtime_.plan.visits.shared) {
    const auto gathered = find_overlaps(runtime_.plan.gather_pool, runtime_.plan.visits.gathered);
    for (Group &group : runtime_.groups)
      for (GatheredPiece &slot : group.slots) slot.overlaps = gathered[slot.key];
  }
  find_part_overlaps();
}

void GroupMaker::find_part_overlaps() {
  auto overlaps = find_overlaps(runtime_.plan.grad_pool, runtime_.plan.visits.grads);
  for (GradPart &part : runtime_.parts) part.overlaps = std::move(overlaps[part.number]);
  for (Group &group : runtime_.groups) {
    if (group.parts.size() == 1) continue;
    const auto is_own = [&](uint32_t number) { return runtime_.parts[number].group == &group; };
    group.lends_all =
        group.parts.size() <= runtime_.plan.pending_grads &&
        std::ranges::none_of(group.parts, [&](const auto &part) { return std::ranges::any_of(part.overlaps, is_own); });
  }
}

void GroupMaker::make_slots(Group &group) {
  group.slots.resize(group.plan->slots * group.piece_count());
  for (uint32_t s = 0; s < group.plan->slots; ++s)
    for (uint32_t p = 0; p < group.piece_count(); ++p) {
      GatheredPiece &slot = group.pieces_in(s)[p];
      slot.piece = p;
      slot.number = slot_count_++;
      slot.key = runtime_.plan.visits.key(group.index, p, s);
      slot.ready = runtime_.context.device().create_event();
      slot.left.create(runtime_.context.device());
      if (group.plan->copies) add_gathers(group, s, slot);
    }
}

void GroupMaker::add_gathers(const Group &group, uint32_t number, GatheredPiece &slot) const {
  for (const uint32_t b : group.plan->pieces[slot.piece].buckets) {
    const Bucket &bucket = runtime_.storage->buckets()[b];
    for (const Plane &to : bucket.planes) {
      if (!memory::is_gathered(to.plan->kind) || to.plan->slot != number) continue;
      const Plane &from = bucket.plane(memory::published_into(to.plan->kind), to.plan->index);
      const uint64_t bytes = add_gather(slot.gathers, bucket, from, to) * inner_of(bucket).size();
      slot.pulled_bytes += bytes;
      if (bucket.plan->quantization) slot.planes.add(to.plan->index, bytes);
    }
  }
}

// Adds gathers that bring every inner rank's part of a published plane into a full buffer. Returns the bytes of one
// part.
uint64_t GroupMaker::add_gather(std::vector<transport::Gather> &gathers, const Bucket &bucket, const Plane &published,
                                const Plane &to) const {
  const uint64_t number = dtype_size(published.dtype());
  uint64_t sum = 0;
  for (const layout::SubBucket &sub : published.layout->sub_buckets) {
    const uint64_t bytes = sub.shard_count * bucket.plan->slices * number;
    if (bytes == 0) continue;
    transport::Part from = published.part.at(published.index_of(sub, bucket.plan->slices, 0) * number);
    if (published.plan->extent == Extent::whole) from = from.slice(bytes, inner_of(bucket).rank());
    gathers.push_back({from, to.element(sub.full_offset), bytes});
    sum += bytes;
  }
  return sum;
}

void GroupMaker::make_grads(Group &group) {
  Contribution &grad = group.grad;
  const size_t params = group.places.size();
  for (auto *flags : {&grad.acquired, &grad.completed, &grad.touched, &grad.given}) flags->assign(params, 0);
  grad.writers.assign(params, nullptr);
  grad.summed = runtime_.context.device().create_event();
  group.parts = std::span(runtime_.parts).subspan(group.plan->first_part, group.plan->part_count);
  for (uint32_t p = 0; p < group.parts.size(); ++p) {
    for (const uint32_t param : runtime_.plan.parts_of(*group.plan)[p].params) group.places[param].part = p;
    make_part(group, group.plan->first_part + p);
  }
  if (Outer *const outer = runtime_.comms_of(group).outer.get()) outer->add_group(group, *runtime_.storage);
}

void GroupMaker::make_part(Group &group, uint32_t number) {
  GradPart &part = runtime_.parts[number];
  part.number = number;
  part.group = &group;
  part.plan = &runtime_.plan.parts[number];
  part.name = group.spec->name;
  part.flight_name = group.flight_name;
  part.trace_name = group.trace_name;
  if (group.parts.size() > 1) {
    part.name += format_text(": {}", group.spec->params[part.plan->params.front()].name);
    part.flight_name = runtime_.context.flight().keep(part.name);
    if (runtime_.timeline) part.trace_name = runtime_.timeline->keep(part.name);
  }
  part.streams.reserve(16);
  part.written.create(runtime_.context.device());
  for (auto *event : {&part.reduced, &part.opened, &part.hidden}) *event = runtime_.context.device().create_event();
  const float factor = runtime_.spec.factor_of(*group.spec);
  const bool has_outer = runtime_.comms_of(group).outer != nullptr;
  for (const uint32_t b : part.plan->buckets) {
    const Bucket &bucket = runtime_.storage->buckets()[b];
    part.partial = part.partial || bucket.has(PlaneKind::partial);
    part.at_home = part.at_home || bucket.has(PlaneKind::grad_turn);
    for (const layout::SubBucket &sub : bucket.plan->layout.sub_buckets) {
      if (sub.shard_count == 0) continue;
      if (bucket.is_whole() && !has_outer) {
        add_all_reduce(part, bucket, sub, factor);
        continue;
      }
      add_reduce(part, bucket, sub, factor);
      if (bucket.is_whole()) add_whole_grads(group, bucket, sub);
    }
  }
  group.reduced_bytes += part.reduced_bytes;
}

void GroupMaker::add_all_reduce(GradPart &part, const Bucket &bucket, const layout::SubBucket &sub, float factor) {
  const uint64_t element = dtype_size(bucket.plan->grad_dtype);
  const uint32_t ranks = inner_of(bucket).size();
  const Plane &grad = bucket.plane(PlaneKind::grad);
  part.reduced_bytes += sub.shard_count * element * ranks;
  part.all_reduced_bytes += sub.shard_count * (element * ranks + sizeof(float) * (ranks - 1));
  part.everywhere = true;
  part.sums[0].push_back({bucket.plane(PlaneKind::full_grad).part.at(sub.full_offset * element),
                          grad.part.at(sub.full_offset * sizeof(float)), bucket.plan->grad_dtype,
                          bucket.plan->wire_dtype, sub.shard_count * ranks, factor, true,
                          place_in(PlaneKind::rounded, bucket, sub), place_in(PlaneKind::received, bucket, sub)});
}

// Adds the sums of this inner rank: the sums of all its slots.
void GroupMaker::add_reduce(GradPart &part, const Bucket &bucket, const layout::SubBucket &sub, float factor) {
  const memory::BucketPlan &of = *bucket.plan;
  const uint64_t element = dtype_size(of.grad_dtype);
  const uint64_t count = sub.shard_count * of.slices;
  const transport::Part from = bucket.plane(PlaneKind::full_grad).part.at(sub.full_offset * element);
  part.reduced_bytes += count * element * inner_of(bucket).size();
  // Main grads are read again only after all groups were reduced. The outer axis and the file read other sums at once.
  const bool read_late = !runtime_.comms_of(*part.group).outer && !bucket.has(PlaneKind::grad_turn);
  const uint64_t results_bytes = read_late ? runtime_.plan.region(*bucket.plane(PlaneKind::grad).plan).bytes : 0;
  for (uint32_t turn = 0; turn < memory::partial_turns; ++turn) {
    const Plane &sums =
        bucket.has(PlaneKind::partial) ? bucket.plane(PlaneKind::partial, turn) : bucket.main_grad(turn);
    float *to = sums.fp32(sums.index_of(sub, of.slices, inner_of(bucket).rank()));
    part.sums[turn].push_back(
        {from, transport::Part::alone(to), of.grad_dtype, of.wire_dtype, count * inner_of(bucket).size(), factor, false,
         place_in(PlaneKind::rounded, bucket, sub), place_in(PlaneKind::received, bucket, sub), results_bytes});
  }
}

// Adds the gathers that complete whole main grads: after the last sum over the outer axis they bring the other inner
// ranks' parts.
void GroupMaker::add_whole_grads(Group &group, const Bucket &bucket, const layout::SubBucket &sub) {
  const uint64_t bytes = sub.shard_count * bucket.plan->slices * sizeof(float);
  const Plane &grad = bucket.plane(PlaneKind::grad);
  const transport::Part from = grad.part.at(sub.full_offset * sizeof(float)).slice(bytes, inner_of(bucket).rank());
  group.whole_grads.push_back({from, grad.element(sub.full_offset), bytes});
}

void GroupMaker::make_refresh(Group &group) {
  if (group.plan->compute_region() != memory::RegionId::whole_compute || group.spec->strategy == FSDP_STRATEGY_NO_SHARD)
    return;
  for (const uint32_t b : group.plan->buckets) {
    const Bucket &bucket = runtime_.storage->buckets()[b];
    for (const Plane &plane : bucket.planes) {
      if (!memory::is_published(plane.plan->kind)) continue;
      const uint64_t bytes = add_gather(group.refresh, bucket, plane, plane) * (inner_of(bucket).size() - 1);
      group.refreshed_bytes += bytes;
      if (bucket.plan->quantization) group.refreshed_planes.add(plane.plan->index, bytes);
    }
  }
}

}  // namespace fsdp::engine
