// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/grad_home.h"

#include "engine/context/context.h"

namespace fsdp::engine {
namespace {

constexpr auto grads_on_their_way = "main grads on their way to the file, or from it";

}  // namespace

GradHome::GradHome(Context &context, const Storage &storage, std::span<const GradPart> parts, uint32_t mesh) {
  for (uint32_t t = 0; t < turns_.size(); ++t) {
    GradTurn &turn = turns_[t];
    turn.lane = std::make_unique<FileLane>(context, storage, storage.region(memory::RegionId::grad_turns, mesh).memory,
                                           format_text("grads {}.{}", mesh, t));
    turn.sent = context.device().create_event();
    turn.pages.resize(parts.size());
  }
  for (const GradPart &part : parts)
    if (part.group->spec->mesh == mesh) add_pages(storage, part);
}

void GradHome::add_pages(const Storage &storage, const GradPart &part) {
  for (const uint32_t b : part.plan->buckets) {
    const Bucket &bucket = storage.buckets()[b];
    if (!bucket.has(PlaneKind::grad_turn)) continue;
    const Plane &grad = bucket.plane(PlaneKind::grad);
    const uint64_t bytes = round_up(bucket.plan->bytes(*grad.plan, "main grads"), io_alignment);
    for (uint32_t t = 0; t < turns_.size(); ++t)
      turns_[t].pages[part.number].push_back(
          {storage.home_file()->offset_of(grad.data), bytes, bucket.plane(PlaneKind::grad_turn, t).data});
  }
}

// The other buffer may not have written earlier sums of these parts yet.
void GradHome::open(std::span<const GradPart> parts, uint32_t turn, bool adds, device::Stream &stream) {
  GradTurn &own = turns_[turn];
  if (adds) {
    own.lane->wait(*turns_[turn ^ 1].sent);
    for (const GradPart &part : parts)
      for (const HomePages &pages : own.pages[part.number]) own.lane->read(pages, grads_on_their_way);
  }
  own.lane->release(stream);
}

void GradHome::send(std::span<const GradPart> parts, uint32_t turn, const device::Event &summed) {
  GradTurn &own = turns_[turn];
  own.lane->wait(summed);
  for (const GradPart &part : parts)
    for (const HomePages &pages : own.pages[part.number]) own.lane->write(pages, grads_on_their_way);
  own.lane->record(*own.sent);
}

void GradHome::await() {
  for (const GradTurn &turn : turns_) turn.lane->await();
}

}  // namespace fsdp::engine
