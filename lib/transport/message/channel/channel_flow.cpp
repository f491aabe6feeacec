// SPDX-License-Identifier: Apache-2.0
// Channel's data: what may go now, and what is still missing.
#include <algorithm>

#include "transport/message/channel/channel.h"

namespace fsdp::transport::messages {
namespace {

// What is under way to one peer; more would only wait inside the transport.
constexpr uint64_t in_flight_bytes = uint64_t{1} << 20;
constexpr uint64_t least_in_flight = 4;

}  // namespace

void Channel::move_on() {
  answer_questions();
  if (active_) {
    for (uint32_t i = 1; i < size(); ++i) post((rank_ + i) % size());
    if (can_sum() || done()) attention_.store(true, std::memory_order_release);
  }
  // Not for every message: each would cost the waiting thread a turn.
  if (active_ ? attention_.load(std::memory_order_relaxed) : quiet()) transport_.changed().notify_all();
}

uint64_t Channel::gather_allowed() const noexcept {
  return std::min(call_.gathered_from(rank_), call_.reduces() ? summed_ : call_.chunks());
}

// Sums first: a peer that has them needs nothing more for that chunk.
void Channel::post(uint32_t r) {
  Lane &lane = lanes_[r];
  const uint64_t most = std::max(least_in_flight, in_flight_bytes / chunk_bytes_);
  while (lane.met && lane.in_flight < most) {
    if (lane.gather_sent < gather_allowed())
      post_chunk(r, Stage::gather, lane.gather_sent++);
    else if (call_.reduces() && lane.reduce_sent < std::min(call_.chunks(), lane.reduce_allowed))
      post_chunk(r, Stage::reduce, lane.reduce_sent++);
    else
      return;
  }
}

void Channel::post_chunk(uint32_t r, Stage stage, uint64_t chunk) {
  const ByteSpan extent = call_.slice(stage == Stage::reduce ? r : rank_, chunk);
  transport_.prepare(ranks_[r]);
  Header message = header(Kind::data);
  message.stage = stage;
  message.chunk = chunk;
  message.bytes = extent.bytes;
  ++lanes_[r].in_flight;
  ++sending_;
  sent_bytes_.fetch_add(extent.bytes, std::memory_order_relaxed);
  transport_.send_data(ranks_[r], message, extent.data);
}

bool Channel::misses_data(uint32_t r) const noexcept {
  const Lane &lane = lanes_[r];
  const bool reduced = !call_.reduces() || summed_ == call_.chunks() || lane.arrived[summed_ % window_] > summed_;
  return !reduced || lane.gather_arrived < call_.gathered_from(r);
}

bool Channel::can_sum() const noexcept {
  if (!active_ || !call_.reduces() || summed_ == call_.chunks()) return false;
  for (uint32_t r = 0; r < size(); ++r)
    if (r != rank_ && lanes_[r].arrived[summed_ % window_] <= summed_) return false;
  return true;
}

bool Channel::done() const noexcept {
  if (!quiet() || (call_.reduces() && summed_ < call_.chunks())) return false;
  for (uint32_t r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    const Lane &lane = lanes_[r];
    if (misses(r) || lane.gather_sent < call_.gathered_from(rank_)) return false;
    if (call_.reduces() && lane.reduce_sent < call_.chunks()) return false;
  }
  return true;
}

}  // namespace fsdp::transport::messages
