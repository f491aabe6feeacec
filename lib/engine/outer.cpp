// SPDX-License-Identifier: Apache-2.0
#include "engine/outer.h"

#include <algorithm>

#include "base/dtype.h"
#include "engine/context.h"

namespace fsdp::engine {
namespace {

// Neighbours in memory go as one.
void add_sum(std::vector<comm::SumSpan> &spans, float *values, uint64_t count) {
  if (!spans.empty() && spans.back().values + spans.back().count == values)
    spans.back().count += count;
  else
    spans.push_back({values, count});
}

template <class Span>
uint64_t bytes_of(const std::vector<Span> &spans) {
  uint64_t bytes = 0;
  for (const Span &span : spans) bytes += span.count * sizeof(float);
  return bytes;
}

uint64_t bytes_of(const std::vector<comm::WholeSpan> &spans) {
  uint64_t bytes = 0;
  for (const comm::WholeSpan &span : spans) bytes += span.bytes;
  return bytes;
}

}  // namespace

Teams create_teams(Context &context, const layout::Mesh &mesh) {
  Teams teams;
  teams.all = context.create_team(mesh.ranks, "the model");
  return teams;
}

void create_axes(Teams &teams, Context &context, const layout::Mesh &mesh, bool communicates) {
  const uint32_t rank = teams.all->rank();
  teams.inner = teams.all;
  if (mesh.outer_size > 1) {
    teams.inner = context.create_team(mesh.inner_ranks(rank), "the model's inner axis");
    teams.outer = context.create_team(mesh.outer_ranks(rank), "the model's outer axis");
  }
  // One that only has memory needs no transport that must be opened.
  teams.inner_data =
      context.create_device_team(teams.inner, communicates ? context.transport() : comm::DeviceTransport::staging);
  if (teams.outer) teams.outer_data = context.create_device_team(teams.outer, context.transport());
}

void TeamNews::tell() noexcept {
  teams_.for_each_data([this](comm::Team &team) {
    for (const comm::Note &note : team.take_news()) context_.log(note.level, note.text);
  });
}

uint64_t plan_team_bytes(const Context &context, const layout::Mesh &mesh, bool communicates) {
  if (context.on_host()) return 0;
  return (communicates ? comm::device_team_bytes(mesh.inner_size, context.transport()) : 0) +
         (mesh.outer_size > 1 ? 2 * comm::device_message_bytes(mesh.outer_size, context.transport()) : 0);  // sums and weights
}

uint64_t Outer::message_bytes(const Context &context, const layout::Mesh &mesh) {
  if (mesh.outer_size == 1) return 0;
  const auto rank = static_cast<uint32_t>(std::find(mesh.ranks.begin(), mesh.ranks.end(), context.rank()) - mesh.ranks.begin());
  const std::vector<uint32_t> ranks = mesh.outer_ranks(rank);
  // Weights, and parameters (engine/params).
  return context.message_bytes(ranks, true) + 2 * context.message_bytes(ranks, false);
}

Outer::Outer(Context &context, const memory::ModelSpec &spec, const Teams &teams, trace::Lane lane,
             trace::FlightSequence flights)
    : mesh_(spec.mesh),
      rank_(teams.outer->rank()),
      inner_(teams.inner->rank()),
      gathers_(spec.gathers_outer()),
      sums_(teams.outer_data->create_message_communicator("outer sums")),
      weights_(teams.outer_data->create_message_communicator("outer weights", false)),
      stream_(context.device().create_stream("outer")),
      trace_(std::make_unique<StreamTrace>(context, *stream_, lane, flights)) {
  for (auto &event : partial_free_) event = context.device().create_event();
}

// Its work refers to everything else here.
Outer::~Outer() { stream_.reset(); }

void Outer::add_group(Group &group, const Storage &storage) {
  for (const uint32_t b : group.plan->buckets) {
    const Bucket &bucket = storage.buckets()[b];
    if (bucket.plan->frozen) continue;
    for (const layout::SubBucket &sub : bucket.plan->layout.sub_buckets)
      if (sub.shard_count) add_sub_bucket(group, bucket, sub);
  }
}

// Where this rank's inner sums are, and which of their slots is its own.
void Outer::add_sub_bucket(Group &group, const Bucket &bucket, const layout::SubBucket &sub) const {
  const memory::BucketPlan &plan = *bucket.plan;
  const uint64_t group_count = sub.shard_count * plan.slices;
  const uint64_t group_begin = sub.full_offset + inner_ * group_count;
  auto *grads = reinterpret_cast<float *>(bucket.grad.data);
  float *grouped = grads + (bucket.grad.extent == Extent::whole   ? group_begin
                            : bucket.grad.extent == Extent::group ? sub.shard_offset * plan.slices
                                                                  : sub.shard_offset);
  const bool whole_state = plan.main_is_whole;
  if (mesh_.outer == layout::OuterAxis::replicate || (mesh_.outer == layout::OuterAxis::optim && whole_state)) {
    add_sum(group.outer_sums, grouped, group_count);
  } else {
    float *own = bucket.grad.extent == Extent::shard ? grouped : grouped + rank_ * sub.shard_count;
    for (uint32_t turn = 0; turn < 2; ++turn) {
      float *from = plan.uses_partial ? bucket.partial[turn] + sub.shard_offset * plan.slices : grouped;
      group.outer_slices[turn].push_back({from, sub.shard_count, own, false});
    }
  }
  if (!gathers_) return;
  if (!whole_state) {
    const uint64_t element = dtype_size(plan.dtype);
    const uint64_t begin = bucket.compute.extent == Extent::group ? sub.shard_offset * plan.slices : group_begin;
    group.outer_weights.push_back({bucket.compute.data + begin * element, sub.shard_count * element});
  } else if (mesh_.outer == layout::OuterAxis::shard) {
    group.outer_grads.push_back({reinterpret_cast<std::byte *>(grouped), sub.shard_count * sizeof(float)});
  }
}

uint32_t Outer::take_turn(const Group &group, device::Stream &reduce_stream) {
  if (!group.partial) return 0;
  turn_ ^= 1;
  if (!partial_free_[turn_]->done()) reduce_stream.wait(*partial_free_[turn_]);
  return turn_;
}

void Outer::reduce(Group &group, uint32_t turn, bool accumulate, uint64_t version) {
  stream_->wait(*group.grad.reduced);
  const comm::Tag tag{group.index, group.name()};
  if (!group.outer_sums.empty()) {
    const uint64_t bytes = bytes_of(group.outer_sums);
    trace_->begin("all_reduce", group, bytes);
    sums_->all_reduce(group.outer_sums, tag, *stream_);
    trace_->end("all_reduce", group, bytes, version, *sums_);
    ++stats_.all_reduces;
  }
  if (auto &slices = group.outer_slices[turn]; !slices.empty()) {
    for (auto &slice : slices) slice.accumulate = accumulate;
    const uint64_t bytes = bytes_of(slices) * mesh_.outer_size;
    trace_->begin("reduce_scatter", group, bytes);
    sums_->reduce_scatter(slices, tag, *stream_);
    trace_->end("reduce_scatter", group, bytes, version, *sums_);
    ++stats_.reduce_scatters;
  }
  if (group.partial) stream_->record(*partial_free_[turn]);
  stream_->record(*group.grad.summed);
}

void Outer::gather(comm::MessageCommunicator &by, const std::vector<comm::WholeSpan> &spans, Group &group,
                   uint64_t version) {
  const uint64_t bytes = bytes_of(spans) * mesh_.outer_size;
  trace_->begin("all_gather", group, bytes);
  by.all_gather(spans, {group.index, group.name()}, *stream_);
  trace_->end("all_gather", group, bytes, version, by);
  ++stats_.all_gathers;
}

void Outer::gather_grads(Group &group, uint64_t version) {
  if (group.outer_grads.empty()) return;
  gather(*sums_, group.outer_grads, group, version);
  stream_->record(*group.grad.summed);
}

void Outer::gather_weights(Group &group, uint64_t version) {
  if (!group.outer_weights.empty()) gather(*weights_, group.outer_weights, group, version);
}

void Outer::next_round() {
  sums_->next_round();
  trace_->next_round();
}

void Outer::abandon() { sums_->abandon(); }

}  // namespace fsdp::engine
