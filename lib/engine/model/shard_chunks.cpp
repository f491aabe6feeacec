// SPDX-License-Identifier: Apache-2.0
#include "engine/model/shard_chunks.h"

#include <algorithm>

#include "base/dtype.h"
#include "engine/model/file_work.h"
#include "memory/home_plan.h"

namespace fsdp::engine {
namespace {

constexpr auto chunk_call = "fsdp_next_shard_chunk";

// Rests of main weights are in no parameter that the caller updates, and scales of states are never in the file.
bool is_in_chunk(const memory::PlanePlan &plane) {
  return plane.kind == PlaneKind::main || plane.kind == PlaneKind::grad || plane.kind == PlaneKind::state;
}

}  // namespace

ShardChunks::ShardChunks(Runtime &runtime, Optimizer &optimizer)
    : runtime_(runtime), optimizer_(optimizer), home_(optimizer.home()) {
  if (!home_) return;
  segments_.reserve(home_->planned().size());
  planned_.reserve(home_->planned().size());
}

bool ShardChunks::takes(const ShardPart &part) const {
  const Shard &shard = optimizer_.shards()[part.shard];
  return shard.param(runtime_).by_caller() && !optimizer_.is_kept(shard);
}

void ShardChunks::begin() {
  segments_.clear(), planned_.clear();
  for (const HomeUpdate::PlannedSegment &planned : home_->planned()) {
    if (std::ranges::none_of(planned.parts, [&](const ShardPart &part) { return takes(part); })) continue;
    segments_.push_back(planned.segment);
    segments_.back().writes = true;
    planned_.push_back(&planned);
  }
  segment_ = part_ = 0, view_ = nullptr;
  home_->turns().begin(segments_, is_in_chunk);
  runtime_.step.set_gives_chunks(true);
}

template <class T>
T *ShardChunks::bring(T *address) const {
  view_->bring(address, *runtime_.storage->home_file());
  return address;
}

void ShardChunks::give(const ShardPart &part, device::Stream &caller) {
  home_->scale_part(*view_, part, caller);
  const Shard &shard = optimizer_.shards()[part.shard];
  given_ = {&shard, part.first, part.count, nullptr, bring(shard.main_grad() + part.first)};
  given_.main_weight = bring(shard.main_weight() + part.first * dtype_size(shard.main_weight_dtype()));
}

// Orders the caller's work on the last chunk before what follows on other streams.
void ShardChunks::await_work() const {
  if (given_.shard) runtime_.leave_window(runtime_.context.device().caller_stream(stream_));
}

const ShardChunk *ShardChunks::advance(device::Stream &caller) {
  given_ = {};
  while (true) {
    if (view_)
      for (const std::vector<ShardPart> &parts = planned_[segment_ - 1]->parts; part_ < parts.size(); ++part_)
        if (takes(parts[part_])) return give(parts[part_++], caller), &given_;
    view_ = home_->turns().next(caller);
    if (!view_) return nullptr;
    ++segment_, part_ = 0;
  }
}

const ShardChunk *ShardChunks::next(fsdp_stream stream) {
  runtime_.require_eager(chunk_call);
  const CallSpan span(runtime_, "next_shard_chunk");
  runtime_.step.require_window(chunk_call);
  runtime_.step.require_no_matrices(chunk_call);
  device::Stream &caller = runtime_.caller_stream(stream, chunk_call);
  if (!home_) return nullptr;
  await_work();
  runtime_.join_window(caller);
  stream_ = stream;
  const ShardChunk *chunk = nullptr;
  run_on_file(runtime_, chunk_call, [&] {
    if (!runtime_.step.gives_chunks()) begin();
    chunk = advance(caller);
  });
  was_given_ = was_given_ || chunk;
  if (!chunk) runtime_.step.set_gives_chunks(false);
  return chunk;
}

StatePart ShardChunks::state(std::string_view name, const char *call) const {
  runtime_.step.require_window(call);
  if (!given_.shard)
    fail(FSDP_INVALID_STATE,
         "{}: no chunk of a shard is given; call fsdp_next_shard_chunk first, and read its states while its "
         "element_count is not 0",
         call);
  StatePart part = find_state(runtime_, *given_.shard, name, call);
  part.data = bring(part.data + given_.first * dtype_size(part.dtype));
  part.count = &given_.count;
  return part;
}

std::string ShardChunks::find_written() const {
  if (runtime_.step.gives_chunks())
    return "chunks of shards are given, and main weights and states may have been written; call fsdp_next_shard_chunk "
           "until element_count is 0, and then fsdp_publish_weights";
  if (was_given_)
    return "chunks of shards were given in this window, and main weights and states may have been written, which "
           "cannot be restored; call fsdp_publish_weights";
  return {};
}

}  // namespace fsdp::engine
