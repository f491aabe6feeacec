// SPDX-License-Identifier: Apache-2.0
#include "comm/call/launch.h"

#include "comm/call/describe.h"

namespace fsdp::comm {
namespace {

constexpr size_t first_launches = 64;
constexpr size_t first_pieces = 16;

std::unique_ptr<Launch> make_launch(uint64_t piece_count) {
  auto launch = std::make_unique<Launch>();
  launch->pieces.reserve(std::max<uint64_t>(piece_count, first_pieces));
  return launch;
}

}  // namespace

void Launch::add(std::span<const Gather> gathers) {
  for (const Gather &gather : gathers) pieces.push_back({gather.from, Part::alone(gather.to), gather.bytes});
  describe(fingerprint, gathers);
}

void Launch::add(std::span<const Sum> sums, bool accumulate) {
  for (const Sum &sum : sums)
    pieces.push_back({sum.from, sum.to, sum.count, sum.dtype, sum.wire, sum.factor, accumulate});
  describe(fingerprint, sums);
}

void Launch::add_broadcast(const Part &data, uint64_t bytes, uint32_t from_root) {
  root = from_root;
  pieces.push_back({data, data, bytes});
  describe_broadcast(fingerprint, bytes, root);
}

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

}  // namespace fsdp::comm
