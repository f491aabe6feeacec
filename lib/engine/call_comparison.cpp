// SPDX-License-Identifier: Apache-2.0
// Ranks whose gathers and reduces are messages have met, and their sequences of calls differ: which call is the first?
#include <algorithm>
#include <cstring>

#include "engine/meetings.h"

namespace fsdp::engine {
namespace {

// What travels: the number of calls, then those that were kept.
std::vector<std::byte> pack(const CallSequence &sequence) {
  const uint64_t count = sequence.count();
  std::vector<std::byte> bytes(sizeof count + sequence.calls().size_bytes());
  std::memcpy(bytes.data(), &count, sizeof count);
  if (!sequence.calls().empty())
    std::memcpy(bytes.data() + sizeof count, sequence.calls().data(), sequence.calls().size_bytes());
  return bytes;
}

struct Calls {
  uint64_t count = 0;
  std::vector<SequencedCall> kept;

  explicit Calls(std::span<const std::byte> bytes)
      : kept(bytes.size() > sizeof count ? (bytes.size() - sizeof count) / sizeof(SequencedCall) : 0) {
    if (bytes.size() >= sizeof count) std::memcpy(&count, bytes.data(), sizeof count);
    if (!kept.empty()) std::memcpy(kept.data(), bytes.data() + sizeof count, kept.size() * sizeof(SequencedCall));
  }
};

std::string describe(const Runtime &state, const Calls &calls, size_t index) {
  if (index >= calls.kept.size()) return calls.count > calls.kept.size() ? "something later" : "nothing more";
  const SequencedCall &call = calls.kept[index];
  if (call.kind == CallKind::replay) return format_text("replayed capture {}", call.group);
  if (call.kind == CallKind::cancel) return format_text("gave up the replay of capture {}", call.group);
  if (call.kind == CallKind::reduce)
    return call.group < state.parts.size() ? format_text("reduced group '{}'", state.parts[call.group].name)
                                           : "a group that there is not";
  const uint32_t slots = state.plan.visits.slots, group = call.group / slots;
  if (group >= state.groups.size()) return "a group that there is not";
  return format_text("gathered group '{}'{}", state.groups[group].name(), call.group % slots ? " for BACKWARD" : "");
}

std::string describe_difference(const Runtime &state, uint32_t a, const Calls &of_a, uint32_t b, const Calls &of_b) {
  const size_t both = std::min(of_a.kept.size(), of_b.kept.size());
  const auto same = static_cast<size_t>(
      std::mismatch(of_a.kept.begin(), of_a.kept.begin() + static_cast<ptrdiff_t>(both), of_b.kept.begin()).first -
      of_a.kept.begin());
  return format_text(
      "ranks gathered and reduced different things since the last update: as number {}, rank {} {}, rank {} {} "
      "({} and {} calls in all)",
      same + 1, state.teams.all->world_rank(a), describe(state, of_a, same), state.teams.all->world_rank(b),
      describe(state, of_b, same), of_a.count, of_b.count);
}

}  // namespace

// Ranks of one inner axis exchange messages with each other. Whether any differ is the same on all ranks, so that all
// of them come to the exchange.
void Meetings::compare_calls(Differences &found) {
  const Runtime &state = runtime_;
  const uint32_t size = state.teams.all->size(), inner = state.spec.mesh.inner_size;
  const auto first_of = [&](uint32_t r) { return r - r % inner; };
  uint32_t odd = 0;  // the lowest that differs; 0: none, since that one is a first one
  for (uint32_t r = 0; r < size; ++r) {
    if (meetings_[r].intent == Intent::discard) return;
    if (odd == 0 && meetings_[r].calls != meetings_[first_of(r)].calls) odd = r;
  }
  if (odd == 0) return;
  const std::vector<std::byte> mine = pack(state.calls);
  const auto all = state.teams.all->all_gather(mine, "gathers and reduces that differ");
  const uint32_t first = first_of(odd);
  found.mismatch = true;
  found.add(state.teams.all->world_rank(odd),
            describe_difference(state, first, Calls(all[first]), odd, Calls(all[odd])));
}

}  // namespace fsdp::engine
