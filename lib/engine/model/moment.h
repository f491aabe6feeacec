// SPDX-License-Identifier: Apache-2.0
// The state that calls change in a sealed model, apart from its memory. A copy of it is a moment in a step, to which a
// model can return. Graphs need this (capture.h).
#pragma once

#include <string>
#include <vector>

#include "engine/gradients/reduce.h"
#include "engine/runtime/runtime.h"
#include "engine/weights/gather.h"

namespace fsdp::engine {

struct Moment {
  StepState step;
  VisitCursor::Positions cursors;
  Reducer::Pool pool;
  std::vector<SlotState> slots;  // slots of all groups
  std::vector<ContributionState> grads;
  std::vector<PartState> parts;  // parts of full gradients of all groups
  Stats stats;
  std::vector<OuterState> outer;  // by mesh; unused without an outer axis
};

Moment read_state(const Runtime &runtime, const Gatherer &gatherer, const Reducer &reducer);
void write_state(const Moment &state, Runtime &runtime, Gatherer &gatherer, Reducer &reducer);

// Describes to people the first difference that would make the calls of a step different; empty if there is none.
// Counters and the number of steps do not count.
std::string find_difference(const Moment &expected, const Moment &found, const Runtime &runtime);
// The state that results if the changes from `before` to `after` happen to `now`.
Moment advance(const Moment &now, const Moment &before, const Moment &after);

}  // namespace fsdp::engine
