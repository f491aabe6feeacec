// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/outer.h"

#include <algorithm>

#include "base/dtype.h"
#include "engine/context/context.h"

namespace fsdp::engine {
namespace {

transport::Sum plain_sum(float *from, float *to, uint64_t count, bool everywhere) {
  return {
      .from = transport::Part::alone(from), .to = transport::Part::alone(to), .count = count, .everywhere = everywhere};
}

// Adds a sum. Sums that follow each other in memory become one.
void add_sum(std::vector<transport::Sum> &sums, float *values, uint64_t count) {
  if (!sums.empty() && sums.back().from.floats() + sums.back().count == values)
    sums.back().count += count;
  else
    sums.push_back(plain_sum(values, values, count, true));
}

uint64_t bytes_of(const std::vector<transport::Sum> &sums) {
  uint64_t bytes = 0;
  for (const transport::Sum &sum : sums) bytes += sum.count * sizeof(float);
  return bytes;
}

uint64_t bytes_of(const std::vector<transport::Gather> &gathers) {
  uint64_t bytes = 0;
  for (const transport::Gather &gather : gathers) bytes += gather.bytes;
  return bytes;
}

// A gather into `whole`, which already has this rank's piece at its place.
transport::Gather gather_in(std::byte *whole, uint64_t bytes, uint32_t rank) {
  return {transport::Part::alone(whole + rank * bytes), whole, bytes};
}

}  // namespace

Outer::Outer(Context &context, const layout::Mesh &mesh, const Teams &teams, device::Stream &stream, StreamTrace &trace,
             uint64_t longest_call)
    : mesh_(mesh),
      rank_(teams.outer->rank()),
      inner_(teams.inner->rank()),
      gathers_(mesh.slices() > 1),
      sums_(teams.outer_data->create_collectives("outer sums", transport::Shape::messages(true, longest_call))),
      weights_(teams.outer_data->create_collectives("outer weights", transport::Shape::messages(false, longest_call))),
      stream_(stream),
      trace_(trace) {
  for (auto &event : partial_free_) event = context.device().create_event();
}

void Outer::add_group(Group &group, const Storage &storage) {
  for (GradPart &part : group.parts) add_part(group, part, storage);
}

void Outer::add_part(Group &group, GradPart &part, const Storage &storage) const {
  for (const uint32_t b : part.plan->buckets) {
    const Bucket &bucket = storage.buckets()[b];
    for (const layout::SubBucket &sub : bucket.plan->layout.sub_buckets)
      if (sub.shard_count) add_sub_bucket(group, sums_each() ? part.outer : group.outer, bucket, sub);
    for (const Plane &plane : bucket.planes)
      if (gathers_ && !bucket.is_whole() && memory::is_published(plane.plan->kind))
        add_weights(group, plane, bucket.plan->slices);
  }
}

// Adds the places of this rank's inner sums, and finds which of the sums' slots is this rank's own.
void Outer::add_sub_bucket(Group &group, OuterSums &sums, const Bucket &bucket, const layout::SubBucket &sub) const {
  const uint32_t slices = bucket.plan->slices;
  const bool whole_state = bucket.is_whole();
  const auto grouped = [&](const Plane &plane) { return plane.fp32(plane.index_of(sub, slices, inner_)); };
  for (uint32_t turn = 0; turn < memory::partial_turns; ++turn) {
    const Plane &grad = bucket.main_grad(turn);
    if (mesh_.outer == layout::OuterAxis::replicate || (mesh_.outer == layout::OuterAxis::optim && whole_state)) {
      add_sum(sums.everywhere[turn], grouped(grad), sub.shard_count * slices);
      continue;
    }
    float *own = grad.plan->extent == Extent::shard ? grouped(grad) : grouped(grad) + rank_ * sub.shard_count;
    const Plane &from = bucket.has(PlaneKind::partial) ? bucket.plane(PlaneKind::partial, turn) : grad;
    sums.slices[turn].push_back(plain_sum(grouped(from), own, sub.shard_count * mesh_.outer_size, false));
  }
  if (gathers_ && whole_state && mesh_.outer == layout::OuterAxis::shard)
    group.outer_grads.push_back(gather_in(reinterpret_cast<std::byte *>(grouped(bucket.plane(PlaneKind::grad))),
                                          sub.shard_count * sizeof(float), rank_));
}

// Adds the slots of this inner rank's part. Each outer rank publishes its own slot.
void Outer::add_weights(Group &group, const Plane &plane, uint32_t slices) const {
  const uint64_t number = dtype_size(plane.dtype());
  for (const layout::SubBucket &sub : plane.layout->sub_buckets)
    if (sub.shard_count)
      group.outer_weights.push_back(
          gather_in(plane.element(plane.index_of(sub, slices, inner_)), sub.shard_count * number, rank_));
}

uint32_t Outer::take_turn(const GradPart &part, device::Stream &reduce_stream) {
  if (!part.partial) return 0;
  const uint32_t turn = state_.turn ^= 1;
  if (!partial_free_[turn]->done()) reduce_stream.wait(*partial_free_[turn]);
  return turn;
}

OuterState Outer::state() const {
  OuterState state = state_;
  state.stats.sent_bytes = sums_->sent_bytes() + weights_->sent_bytes() - uncounted_bytes_;
  return state;
}

void Outer::set_state(const OuterState &state) {
  uncounted_bytes_ = sums_->sent_bytes() + weights_->sent_bytes() - state.stats.sent_bytes;
  state_ = state;
}

void Outer::sum(const OuterSums &sums, uint32_t turn, bool accumulate, const transport::Tag &tag, const Traced &of,
                uint64_t version) {
  if (const auto &everywhere = sums.everywhere[turn]; !everywhere.empty()) {
    const uint64_t bytes = bytes_of(everywhere);
    trace_.begin("all_reduce", of, bytes);
    sums_->sum(everywhere, false, tag, stream_);
    trace_.end("all_reduce", of, bytes, version, *sums_);
    ++state_.stats.all_reduces;
  }
  if (const auto &slices = sums.slices[turn]; !slices.empty()) {
    const uint64_t bytes = bytes_of(slices);
    trace_.begin("reduce_scatter", of, bytes);
    sums_->sum(slices, accumulate, tag, stream_);
    trace_.end("reduce_scatter", of, bytes, version, *sums_);
    ++state_.stats.reduce_scatters;
  }
}

void Outer::reduce_part(GradPart &part, uint32_t turn, bool accumulate, uint64_t version) {
  stream_.wait(*part.reduced);
  sum(part.outer, turn, accumulate, {part.number, part.name.c_str(), nullptr, note_}, part, version);
  if (part.partial) stream_.record(*partial_free_[turn]);
  stream_.record(*part.group->grad.summed);
}

void Outer::reduce_group(Group &group, uint32_t turn, const device::Event &reduced, uint64_t version) {
  stream_.wait(reduced);
  sum(group.outer, turn, false, {group.index, group.name(), nullptr, note_}, group, version);
  stream_.record(*group.grad.summed);
}

void Outer::gather(transport::Collectives &by, const std::vector<transport::Gather> &gathers, Group &group,
                   uint64_t version) {
  const uint64_t bytes = bytes_of(gathers) * mesh_.outer_size;
  trace_.begin("all_gather", group, bytes);
  by.gather(gathers, {group.index, group.name()}, stream_);
  trace_.end("all_gather", group, bytes, version, by);
  ++state_.stats.all_gathers;
}

void Outer::gather_grads(Group &group, uint64_t version) {
  if (group.outer_grads.empty()) return;
  gather(*sums_, group.outer_grads, group, version);
  stream_.record(*group.grad.summed);
}

void Outer::gather_values(const Traced &of, std::byte *whole, uint64_t bytes, const device::Event &after,
                          uint64_t version) {
  stream_.wait(after);
  const transport::Gather gather = gather_in(whole, bytes, rank_);
  trace_.begin("all_gather", of, bytes * mesh_.outer_size);
  sums_->gather({&gather, 1}, {no_group, of.in_flight}, stream_);
  trace_.end("all_gather", of, bytes * mesh_.outer_size, version, *sums_);
}

void Outer::gather_weights(Group &group, uint64_t version) {
  if (!group.outer_weights.empty()) gather(*weights_, group.outer_weights, group, version);
}

}  // namespace fsdp::engine
