// SPDX-License-Identifier: Apache-2.0
#include "engine/model/moment.h"

#include <algorithm>
#include <numeric>

namespace fsdp::engine {
namespace {

const char *grad_name(GradStage state) {
  switch (state) {
    case GradStage::lent: return "lent";
    case GradStage::reducing: return "being reduced";
    default: return "free";
  }
}

uint32_t count(const SlotState::Counts &holds) { return std::accumulate(holds.begin(), holds.end(), 0u); }

std::string compare_slot(const SlotState &expected, const SlotState &found, const Group &group) {
  if (expected.gathered != found.gathered)
    return format_text("group '{}' {} gathered, and {} then", group.name(), found.gathered ? "is" : "is not",
                       expected.gathered ? "was" : "was not");
  if (expected.piece_holds != found.piece_holds)
    return format_text("group '{}' has {} holds and {} of a piece, and had {} and {} then", group.name(),
                       count(found.holds), count(found.piece_holds), count(expected.holds),
                       count(expected.piece_holds));
  if (expected.holds != found.holds)
    return format_text("group '{}' has {} holds, and {} then", group.name(), found.hold_count(), expected.hold_count());
  return {};
}

std::string compare_part(const PartState &expected, const PartState &found, const GradPart &part) {
  if (expected.stage != found.stage)
    return format_text("the gradient buffer of group '{}' is {}, and was {} then", part.name, grad_name(found.stage),
                       grad_name(expected.stage));
  if (expected.given != found.given)
    return format_text("the gradients of group '{}' were {} in this contribution, and {} then", part.name,
                       found.given ? "reduced" : "not reduced", expected.given ? "were" : "were not");
  return {};
}

std::string compare_grad(const ContributionState &expected, const ContributionState &found, const Group &group) {
  if (expected.given_count != found.given_count && (expected.given_count == 0 || found.given_count == 0))
    return format_text(
        "group '{}' has {} contributions in this step, and had {} then: the first overwrites and later ones "
        "add, which are two captures",
        group.name(), found.given_count, expected.given_count);
  if (expected.last != found.last || expected.touched != found.touched || expected.acquired != found.acquired ||
      expected.completed != found.completed || expected.open != found.open)
    return format_text("the gradients of group '{}' have not been written as they had been then", group.name());
  return {};
}

OuterState advance(const OuterState &now, const OuterState &before, const OuterState &after) {
  OuterState state = after;
  const auto add = [&](uint64_t OuterStats::*counter) {
    state.stats.*counter = now.stats.*counter + (after.stats.*counter - before.stats.*counter);
  };
  for (auto counter :
       {&OuterStats::all_reduces, &OuterStats::reduce_scatters, &OuterStats::all_gathers, &OuterStats::sent_bytes})
    add(counter);
  return state;
}

// Adds to the counters what the capture counted. Numbers that are not counters are those after the capture.
Stats advance(const Stats &now, const Stats &before, const Stats &after) {
  Stats stats = now;
  const auto add = [&](uint64_t Stats::*counter) { stats.*counter += after.*counter - before.*counter; };
  for (auto counter : {&Stats::gathers, &Stats::reduces, &Stats::all_gathers, &Stats::reduce_scatters,
                       &Stats::all_reduces, &Stats::gathered_bytes, &Stats::reduced_bytes, &Stats::prefetches,
                       &Stats::dropped_prefetches, &Stats::reduce_scatter_bytes, &Stats::all_reduce_bytes,
                       &Stats::gathered_row_bytes, &Stats::gathered_column_bytes})
    add(counter);
  stats.gathered_groups = after.gathered_groups;
  stats.pending_grads = after.pending_grads;
  stats.peak_gathered_groups = std::max(now.peak_gathered_groups, after.peak_gathered_groups);
  stats.peak_pending_grads = std::max(now.peak_pending_grads, after.peak_pending_grads);
  return stats;
}

}  // namespace

Moment read_state(const Runtime &runtime, const Gatherer &gatherer, const Reducer &reducer) {
  Moment state;
  state.step = runtime.step.state();
  state.cursors = gatherer.cursors();
  state.pool = reducer.pool();
  state.stats = runtime.stats;
  for (const MeshComms &mesh_comms : runtime.comms)
    state.outer.push_back(mesh_comms.outer ? mesh_comms.outer->state() : OuterState());
  for (const Group &group : runtime.groups) {
    state.slots.insert(state.slots.end(), group.slots.begin(), group.slots.end());
    state.grads.push_back(group.grad);
  }
  state.parts.assign(runtime.parts.begin(), runtime.parts.end());
  return state;
}

void write_state(const Moment &state, Runtime &runtime, Gatherer &gatherer, Reducer &reducer) {
  runtime.step.set_state(state.step);
  gatherer.set_cursors(state.cursors);
  reducer.set_pool(state.pool);
  runtime.stats = state.stats;
  for (size_t mesh = 0; mesh < runtime.comms.size(); ++mesh)
    if (runtime.comms[mesh].outer) runtime.comms[mesh].outer->set_state(state.outer[mesh]);
  size_t slot = 0;
  for (Group &group : runtime.groups) {
    for (GatheredPiece &own : group.slots) static_cast<SlotState &>(own) = state.slots[slot++];
    static_cast<ContributionState &>(group.grad) = state.grads[group.index];
  }
  for (GradPart &part : runtime.parts) static_cast<PartState &>(part) = state.parts[part.number];
}

std::string find_difference(const Moment &expected, const Moment &found, const Runtime &runtime) {
  if (expected.step.window_open != found.step.window_open)
    return format_text("the update window is {}, and was {} then", found.step.window_open ? "open" : "closed",
                       expected.step.window_open ? "open" : "closed");
  if (expected.step.window_has_grads != found.step.window_has_grads)
    return format_text("the update window {} gradients, and {} then", found.step.window_has_grads ? "has" : "has no",
                       expected.step.window_has_grads ? "had" : "had none");
  size_t slot = 0;
  for (const Group &group : runtime.groups) {
    for (size_t s = 0; s < group.slots.size(); ++s, ++slot)
      if (std::string text = compare_slot(expected.slots[slot], found.slots[slot], group); !text.empty()) return text;
    for (const GradPart &part : group.parts)
      if (std::string text = compare_part(expected.parts[part.number], found.parts[part.number], part); !text.empty())
        return text;
    if (std::string text = compare_grad(expected.grads[group.index], found.grads[group.index], group); !text.empty())
      return text;
  }
  return {};
}

Moment advance(const Moment &now, const Moment &before, const Moment &after) {
  Moment state = after;
  state.step.version = now.step.version + (after.step.version - before.step.version);
  state.step.adamw_step = now.step.adamw_step + (after.step.adamw_step - before.step.adamw_step);
  state.stats = advance(now.stats, before.stats, after.stats);
  for (size_t mesh = 0; mesh < state.outer.size(); ++mesh)
    state.outer[mesh] = advance(now.outer[mesh], before.outer[mesh], after.outer[mesh]);
  for (size_t g = 0; g < state.grads.size(); ++g) {
    ContributionState &grad = state.grads[g];
    // If the step goes on, its contributions from before the graph count, too. If it ended in the graph, the count
    // starts at 0.
    if (after.step.version != before.step.version) continue;
    grad.reduced_count = now.grads[g].reduced_count + (grad.reduced_count - before.grads[g].reduced_count);
    grad.given_count = now.grads[g].given_count + (grad.given_count - before.grads[g].given_count);
  }
  return state;
}

}  // namespace fsdp::engine
