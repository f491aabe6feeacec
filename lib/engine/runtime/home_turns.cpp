// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/home_turns.h"

#include <algorithm>

#include "memory/home_plan.h"

namespace fsdp::engine {

HomeTurns::HomeTurns(Runtime &runtime)
    : runtime_(runtime),
      file_(*runtime.storage->home_file()),
      memory_(runtime.storage->region(memory::RegionId::turns).data),
      turn_bytes_(runtime.plan.region(memory::RegionId::turns).bytes / runtime.spec.homes.turns),
      views_(runtime.spec.homes.turns),
      reader_("fsdp-home-read", runtime.storage->home_file(), runtime.storage->region(memory::RegionId::turns).memory,
              runtime.context.device_traits().host_memory),
      writer_("fsdp-home-write", runtime.storage->home_file(), runtime.storage->region(memory::RegionId::turns).memory,
              runtime.context.device_traits().host_memory),
      updated_(runtime.context.device().create_event()) {}

// Places the pages of elements of a plane at `memory`, and moves `memory` behind them. Pieces of one plane that share a
// page, or lie one behind the other, become one. The plane's entries in the view begin at number `first`.
void HomeTurns::add_pages(HomeView &view, size_t first, const Plane &plane, uint64_t begin, uint64_t end,
                          std::byte *&memory) const {
  const uint64_t from = file_.offset_of(plane.element(begin));
  HomePages pages{page_of(from), round_up(from + (end - begin) * dtype_size(plane.dtype()), io_alignment), memory};
  pages.bytes -= pages.offset;
  if (view.pages.size() > first && pages.offset <= view.pages.back().offset + view.pages.back().bytes) {
    HomePages &last = view.pages.back();
    memory -= last.bytes;
    last.bytes = std::max(last.bytes, pages.offset + pages.bytes - last.offset);
    memory += last.bytes;
    return;
  }
  view.pages.push_back(pages);
  memory += pages.bytes;
}

// Places the pages of the segment's planes one after the other in the turn. In a plane of all slots (Extent::group),
// this rank's elements are one run in each sub-bucket.
void HomeTurns::fill(HomeView &view, const HomeSegment &segment, std::byte *memory) const {
  view.segment = segment;
  view.pages.clear(), view.written.clear();
  std::byte *end = memory;
  for (const Plane &plane : segment.bucket->planes) {
    if (!plane.plan->in_file() || !takes_(*plane.plan)) continue;
    const size_t own = view.pages.size();
    if (plane.plan->extent != Extent::group) {
      add_pages(view, own, plane, segment.begin, segment.end, end);
      if (segment.writes && plane.plan->kind != PlaneKind::grad) view.written.push_back(view.pages.back());
      continue;
    }
    const MeshComms &comms = runtime_.comms[plane.plan->mesh];
    const uint64_t slices = segment.bucket->plan->slices, slice = comms.mesh.outer_index(comms.rank());
    for (const layout::SubBucket &sub : plane.layout->sub_buckets) {
      const uint64_t first = std::max(segment.begin, sub.shard_offset);
      const uint64_t after = std::min(segment.end, sub.shard_offset + sub.shard_count);
      const uint64_t before = sub.shard_offset * (slices - 1) + slice * sub.shard_count;
      if (first < after) add_pages(view, own, plane, before + first, before + after, end);
    }
  }
  if (const auto bytes = static_cast<uint64_t>(end - memory); bytes > turn_bytes_)
    fail(FSDP_INTERNAL, "a segment of the home file needs {} bytes of a turn of {}", bytes, turn_bytes_);
}

void HomeTurns::give_segments() {
  for (; given_ - first_ < segments_.size() && writer_.done(given_ < views_.size() ? 0 : given_ - views_.size() + 1);
       ++given_) {
    fill(turn(given_), segments_[given_ - first_], memory_ + given_ % views_.size() * turn_bytes_);
    reader_.read(turn(given_).pages);
  }
}

void HomeTurns::begin(std::span<const HomeSegment> segments, Takes takes) {
  segments_ = segments, takes_ = takes;
  first_ = next_ = given_;
  give_segments();
}

const HomeView *HomeTurns::next(device::Stream &caller) {
  if (next_ > first_) {
    caller.record(*updated_);
    runtime_.context.device().synchronize(*updated_);
    writer_.write(turn(next_ - 1).written);
  }
  if (next_ - first_ == segments_.size()) {
    await(writer_, next_);
    return nullptr;
  }
  give_segments();
  // With the smallest number of turns the segment may need the turn of one that is still being written.
  if (given_ == next_) {
    await(writer_, given_ - views_.size() + 1);
    give_segments();
  }
  await(reader_, next_ + 1);
  return &turn(next_++);
}

void HomeTurns::await(HomeThread &thread, uint64_t transfer) {
  if (thread.ended(transfer)) return thread.await(transfer, {}, [] { return true; });  // throws the thread's error
  WaitSpan span(runtime_, WaitKind::home);
  const uint64_t before = file_.moved_bytes();
  thread.await(transfer, disk_patience(runtime_.context.timeout_ms()), [&] {
    runtime_.context.waiter().poll();
    return true;
  });
  span.set_bytes(file_.moved_bytes() - before);
}

}  // namespace fsdp::engine
