// SPDX-License-Identifier: Apache-2.0
#include "transport/call/launch.h"

namespace fsdp::transport {
namespace {

constexpr size_t first_launches = 64;
constexpr size_t first_pieces = 16;

std::unique_ptr<Launch> make_launch(uint64_t piece_count) {
  auto launch = std::make_unique<Launch>();
  launch->pieces.reserve(std::max<uint64_t>(piece_count, first_pieces));
  return launch;
}

}  // namespace

LaunchPool::LaunchPool() {
  for (size_t i = 0; i < first_launches; ++i) launches_.push_back(make_launch(0));
}

// The smallest that is large enough: large ones stay free for those who need them, so the pool stops growing after the
// first step that has the most in flight.
Launch &LaunchPool::find(uint64_t piece_count) {
  Launch *best = nullptr;
  for (const auto &launch : launches_) {
    if (launch->busy.load(std::memory_order_acquire) || launch->pieces.capacity() < piece_count) continue;
    if (!best || launch->pieces.capacity() < best->pieces.capacity()) best = launch.get();
    if (best->pieces.capacity() == first_pieces) return *best;
  }
  if (best) return *best;
  launches_.push_back(make_launch(piece_count));
  return *launches_.back();
}

Launch &LaunchPool::take(Operation operation, const Tag &tag, uint64_t piece_count) {
  Launch &launch = find(piece_count);
  launch.pieces.clear();
  launch.busy.store(true, std::memory_order_relaxed);
  launch.start(operation, tag);
  return launch;
}

}  // namespace fsdp::transport
