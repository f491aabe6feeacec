// SPDX-License-Identifier: Apache-2.0

#include "transport/staging/conveyor.h"

#include <unistd.h>

#include <vector>

#include "transport/call/launch.h"
#include "transport/exchange.h"

namespace fsdp::transport::staging {

namespace {

// Must this rank pin the view? Under ThreadSanitizer the ranks of one process share one view of shared memory
// (base/mapping.h), and the first of them pins it. Otherwise every rank has its own view.
bool pins(Team &team, const std::byte *view, const std::string &what) {
  struct ViewPlace {
    uint64_t process, address;
    bool operator==(const ViewPlace &) const = default;
  };
  const ViewPlace mine{static_cast<uint64_t>(::getpid()), reinterpret_cast<uintptr_t>(view)};
  std::vector<ViewPlace> all(team.size());
  team.all_gather(&mine, sizeof mine, all.data(), what.c_str());
  for (uint32_t r = 0; r < team.rank(); ++r)
    if (all[r] == mine) return false;
  return true;
}

}  // namespace

uint64_t MoveChunks::count(uint32_t ranks) const {
  uint64_t most = 0;
  for (uint32_t r = 0; r < ranks; ++r)
    for (const Destination to : {Destination::others, Destination::itself}) {
      uint64_t chunks = 0;
      for (Cursor at; at.span < moves_.size(); ++chunks) at = fill(r, to, at, [](const ChunkPiece &) {});
      most = std::max(most, chunks);
    }
  return most;
}

// All of the memory is writable on this rank, although the rank writes only its own parts, because not every driver can
// pin read-only memory.
Slots::Slots(Team &team, device::Device &device, uint64_t count, uint64_t part_bytes, const std::string &what)
    : device_(device), count_(count), part_bytes_(part_bytes) {
  const Range all{0, count * part_bytes * team.size()};
  arena_ = team.create_arena(all.bytes, std::span(&all, 1), what);
  const bool pinned_here = pins(team, arena_->writable(), what);
  const auto pin = [&] {
    if (!pinned_here) return;
    device.register_host(arena_->writable(), all.bytes);
    registered_bytes_ = all.bytes;
  };
  try {
    attempt_together(team, what, pin);
  } catch (...) {
    unpin();
    throw;
  }
}

Slots::~Slots() { unpin(); }

// If the device may still use the memory, it stays mapped.
void Slots::unpin() noexcept {
  if (registered_bytes_ && !device_.unregister_host(arena_->writable(), registered_bytes_)) (void)arena_.release();
}

Conveyor::Conveyor(device::Device &device, const std::string &name) : device_(device), turn_(device.create_event()) {
  for (auto *events : {&brought_, &taken_})
    for (auto &event : *events) event = device.create_event();
  for (auto &event : paces_) event = device.create_event();
  down_ = device.create_stream(name + "-down");
  up_ = device.create_stream(name + "-up");
  lane_ = device.create_host_lane(name);
}

void Conveyor::begin(device::Stream &stream) {
  stream.record(*turn_);
  down_->wait(*turn_);
}

void Conveyor::end(device::Stream &stream, device::Event &done) {
  up_->record(done);
  stream.wait(done);
}

void Conveyor::turn() {
  up_->record(*turn_);
  down_->wait(*turn_);
}

void Conveyor::pace(uint64_t chunk) {
  if (chunk % stride) return;
  const device::Event &before = *paces_[chunk / stride % 2];
  if (!before.done()) device_.synchronize(before);
}

void Conveyor::mark_taken(uint64_t chunk) {
  up_->record(*taken_[chunk % slots]);
  if (chunk % stride == stride - 1) up_->record(*paces_[chunk / stride % 2]);
}

void refuse_capture(const device::Stream &stream, const Fingerprint &call) {
  if (stream.capture_id() == 0) return;
  fail(FSDP_UNSUPPORTED,
       "{} cannot be part of a graph: these ranks exchange memory of GPUs through memory of the host (staging, UCX); "
       "use NCCL "
       "for what is captured, or leave gathers and reduces outside of the capture",
       call.name);
}

}  // namespace fsdp::transport::staging
