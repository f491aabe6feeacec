// SPDX-License-Identifier: Apache-2.0
// The messages between leaders, over a FrameStream after the handshake. Frames of each kind have a fixed length, except
// states (states.h). Nodes of one job run the same library on the same kind of processor, so a message is sent
// as its bytes in memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

#include "membership/liveness/control.h"
#include "membership/tree/plan.h"
#include "membership/wire/frame.h"
#include "membership/wire/frame_stream.h"

namespace fsdp::membership::tree {

// Report and Verdict (verdict.h) have kinds 103 and 104.
enum class LinkKind : uint32_t { hello = 101, beat, states = 105, goodbye, post, wait_text };
constexpr uint32_t version = 7;

// The purpose of a connection. tree: from a child to its parent. refuge: from a leader that has lost its way to the
// root.
enum class Bond : uint32_t { tree, refuge };

// The first message, from the leader that connected, and the answer to it.
struct LinkHello {
  static constexpr LinkKind kind = LinkKind::hello;
  uint32_t version, node, node_count, world_size, byte_order;
  Bond bond;
};
struct Beat {
  static constexpr LinkKind kind = LinkKind::beat;
  uint64_t number;
};
// The state of one rank, from its node to all others.
struct RankState {
  uint32_t rank;
  int32_t process;
  uint32_t membership, awaited_rank;
  uint64_t wait_and_looks;
};
static_assert(sizeof(RankState) == 24);
// Names the call in which a rank waits, if the rank is in a cycle of waits.
struct WaitText {
  static constexpr LinkKind kind = LinkKind::wait_text;
  uint32_t rank, number;  // number: the number of the rank's wait
  WaitTexts::Copy text;
};
// A rank's post for others (World::post).
struct Post {
  static constexpr LinkKind kind = LinkKind::post;
  static constexpr uint32_t everybody = UINT32_MAX;
  uint32_t rank, to;  // to: one rank, or all ranks
  std::array<std::byte, post_bytes> bytes;
  PostTexts::Copy text;
};
// The sender leaves in order: the end of its connection is no failure, and it passes on no more messages.
struct Goodbye {
  static constexpr LinkKind kind = LinkKind::goodbye;
  uint64_t unused;
};
constexpr uint32_t longest = 16 * 1024;
static_assert(sizeof(Report) <= longest);
static_assert(static_cast<uint32_t>(LinkKind::beat) < Report::kind &&
              Verdict::kind < static_cast<uint32_t>(LinkKind::states));
constexpr uint32_t native_order = 0x01020304;

template <class M>
std::span<const std::byte> bytes_of(const M &message) {
  static_assert(std::is_trivially_copyable_v<M> && sizeof(M) <= longest);
  return std::as_bytes(std::span(&message, 1));
}

// The message if the frame is exactly one of kind M; empty if it is not.
template <class M>
std::optional<M> as(const Frame &frame) {
  if (frame.kind != static_cast<uint32_t>(M::kind) || frame.body.size() != sizeof(M)) return {};
  M message;
  std::memcpy(static_cast<void *>(&message), frame.body.data(), sizeof(M));
  return message;
}

inline bool waits(const RankState &state) noexcept { return look_count(state.wait_and_looks) != 0; }

}  // namespace fsdp::membership::tree

namespace fsdp::membership {

// The first messages of two leaders on a connection, after both have proven the job secret. Pure.

// The label that binds the proof of such a connection to the links of this job.
inline std::string link_label(const NodePlan &plan) { return "libfsdp node link " + plan.job; }

inline tree::LinkHello hello_of(const NodePlan &plan, tree::Bond bond) {
  return {tree::version,      plan.node(), plan.node_count(), static_cast<uint32_t>(plan.node_of.size()),
          tree::native_order, bond};
}

inline void greet(FrameStream &stream, const NodePlan &plan, tree::Bond bond) {
  const tree::LinkHello mine = hello_of(plan, bond);
  stream.queue(static_cast<uint32_t>(mine.kind), tree::bytes_of(mine));
}

// The hello of a node of this job with this version of the library; nothing if it is another message.
inline std::optional<tree::LinkHello> read_hello(const NodePlan &plan, const Frame &frame) {
  const auto said = tree::as<tree::LinkHello>(frame);
  const tree::LinkHello mine = hello_of(plan, tree::Bond::tree);
  const bool known = said && said->version == mine.version && said->node_count == mine.node_count &&
                     said->world_size == mine.world_size && said->byte_order == mine.byte_order &&
                     said->node < said->node_count && said->bond <= tree::Bond::refuge;
  return known ? said : std::nullopt;
}

}  // namespace fsdp::membership
