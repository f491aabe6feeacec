// SPDX-License-Identifier: Apache-2.0
#include "comm/nodes/states.h"

#include <cstring>
#include <utility>

namespace fsdp::comm::nodes {
namespace {

// Of each, before its text.
struct StateHead {
  uint32_t rank;
  int32_t process;
  uint32_t membership, for_rank;
  uint64_t looks;
  uint32_t text_bytes, unused;
};

void put(std::vector<std::byte> &body, const State &state) {
  const size_t length = ::strnlen(state.text, sizeof state.text - 1);
  const StateHead head{
      state.rank, state.process, state.membership, state.for_rank, state.looks, static_cast<uint32_t>(length), 0};
  const auto add = [&body](std::span<const std::byte> part) { body.insert(body.end(), part.begin(), part.end()); };
  add(std::as_bytes(std::span(&head, 1)));
  add(std::as_bytes(std::span(state.text, length)));
}

SharedFrame frame_of(const std::vector<std::byte> &body) {
  return share_frame(write_frame(static_cast<uint32_t>(Kind::states), body));
}

// The next one of these bytes, which it is taken from.
std::optional<State> take(std::span<const std::byte> &bytes) {
  StateHead head;
  if (bytes.size() < sizeof head) return {};
  std::memcpy(&head, bytes.data(), sizeof head);
  bytes = bytes.subspan(sizeof head);
  if (head.text_bytes >= sizeof State::text || head.text_bytes > bytes.size()) return {};
  State state{head.rank, head.process, head.membership, head.for_rank, head.looks, {}};
  std::memcpy(state.text, bytes.data(), head.text_bytes);
  bytes = bytes.subspan(head.text_bytes);
  return state;
}

}  // namespace

std::vector<SharedFrame> write_states(const StateMap &states, bool waiting, size_t most_bytes) {
  std::vector<SharedFrame> frames;
  std::vector<std::byte> body;
  for (const auto &[rank, state] : states) {
    if (waits(state) != waiting) continue;
    if (!body.empty() && body.size() + sizeof(StateHead) + sizeof state.text > most_bytes)
      frames.push_back(frame_of(std::exchange(body, {})));
    put(body, state);
  }
  if (!body.empty()) frames.push_back(frame_of(body));
  return frames;
}

std::optional<std::vector<State>> read_states(const Frame &frame) {
  if (frame.kind != static_cast<uint32_t>(Kind::states) || frame.body.empty()) return {};
  std::vector<State> states;
  for (std::span<const std::byte> bytes = frame.body; !bytes.empty();) {
    const auto state = take(bytes);
    if (!state) return {};
    states.push_back(*state);
  }
  return states;
}

}  // namespace fsdp::comm::nodes
