// SPDX-License-Identifier: Apache-2.0
// The states of many ranks in one frame: of a large job they come in thousands, and what each frame costs is its tag.
// Pure functions of bytes.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "membership/tree/message.h"
#include "membership/wire/frame.h"

namespace fsdp::membership::tree {

// The last state of each.
using StateMap = std::map<uint32_t, State>;

// In frames whose bodies have at most so many bytes, which is room for one in any case. waits: those of ranks that
// wait, or of all others.
std::vector<SharedFrame> write_states(const StateMap &states, bool waits, size_t most_bytes);
// Nothing: the frame is none of states.
std::optional<std::vector<State>> read_states(const Frame &frame);

inline bool waits(const State &state) noexcept { return static_cast<uint32_t>(state.looks) != 0; }

}  // namespace fsdp::membership::tree
