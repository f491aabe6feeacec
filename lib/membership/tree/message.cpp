// SPDX-License-Identifier: Apache-2.0

#include "membership/tree/message.h"

#include <cstring>
#include <utility>

namespace fsdp::membership::tree {

namespace {

SharedFrame frame_of(const std::vector<RankState> &states) {
  return share_frame(write_frame(static_cast<uint32_t>(LinkKind::states), std::as_bytes(std::span(states))));
}

}  // namespace

std::vector<SharedFrame> write_states(const StateMap &states, bool waiting, size_t most_bytes) {
  std::vector<SharedFrame> frames;
  std::vector<RankState> body;
  for (const auto &[rank, state] : states) {
    if (waits(state) != waiting) continue;
    if (!body.empty() && (body.size() + 1) * sizeof state > most_bytes)
      frames.push_back(frame_of(std::exchange(body, {})));
    body.push_back(state);
  }
  if (!body.empty()) frames.push_back(frame_of(body));
  return frames;
}

std::optional<std::vector<RankState>> read_states(const Frame &frame) {
  const size_t bytes = frame.body.size();
  if (frame.kind != static_cast<uint32_t>(LinkKind::states) || bytes == 0 || bytes % sizeof(RankState) != 0) return {};
  std::vector<RankState> states(bytes / sizeof(RankState));
  std::memcpy(static_cast<void *>(states.data()), frame.body.data(), bytes);
  return states;
}

}  // namespace fsdp::membership::tree
