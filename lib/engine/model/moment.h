// SPDX-License-Identifier: Apache-2.0
// What calls change in a sealed model, apart from its memory: a copy of it is a moment in a step, to come back to or to
// go on from. Graphs need that (capture.h).
#pragma once

#include <string>
#include <vector>

#include "engine/weights/gather.h"
#include "engine/gradients/reduce.h"
#include "engine/runtime/runtime.h"

namespace fsdp::engine {

struct Moment {
  StepState step;
  Gatherer::Cursors cursors;
  Reducer::Pool pool;
  std::vector<SlotState> slots;  // of all groups
  std::vector<ContributionState> grads;
  std::vector<PartState> parts;  // of full gradients, of all groups
  Stats stats;
  OuterState outer;  // nothing without an outer axis
};

Moment read_state(const Runtime &runtime, const Gatherer &gatherer, const Reducer &reducer);
void write_state(const Moment &state, Runtime &runtime, Gatherer &gatherer, Reducer &reducer);

// Where the calls of a step would not be the same: the first difference for people, empty if there is none. Counters,
// and how many steps have been made, make none.
std::string find_difference(const Moment &expected, const Moment &found, const Runtime &runtime);

// The state after what led from `before` to `after` has happened to `now`.
Moment advance(const Moment &now, const Moment &before, const Moment &after);

}  // namespace fsdp::engine
