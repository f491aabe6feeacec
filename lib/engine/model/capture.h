// SPDX-License-Identifier: Apache-2.0
// A part of a step as a CUDA graph. The caller captures its stream. Between begin and end, the library's calls record
// their work into that capture, and the library's streams join it by events. At the end the changes of the calls to the
// model's state are kept and undone, because none of the work has happened yet. A replay has these steps:
//
//   prepare   on every rank the state must be that from before the capture; the graph is ordered after all work that
//             the library was given; the step's numbers are written to the device
//   launch    done by the caller
//   commit    the state goes on as after the calls of the capture, and later work comes after the graph; or
//   cancel    there was no launch: the state is still that from before the capture
//
// The graph must not refer to events from before the capture. So begin waits until the library's work is done, and
// prepare orders the work that was enqueued since then. The class Graphs drives captures.
#pragma once

#include <string>
#include <vector>

#include "engine/gradients/optimizer.h"
#include "engine/gradients/reduce.h"
#include "engine/runtime/runtime.h"
#include "engine/weights/gather.h"

namespace fsdp::engine {

// The part of a sealed model's state that calls change, apart from its memory. A copy of it describes a moment in a
// step, to which a graph can return the model.
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

// Describes, in words for users, the first difference that would change the calls of a step; empty if there is none.
// Counters and the number of steps are not compared.
std::string find_difference(const Moment &expected, const Moment &found, const Runtime &runtime);
// The state that results if the changes from `before` to `after` are made to `now`.
Moment advance(const Moment &now, const Moment &before, const Moment &after);

// The text that tells other ranks about a failed call.
std::string describe_failure(const char *call, const Error &error);

class Capture {
 public:
  // `number` is the capture's number in the model, from 1; it is the same on every rank.
  Capture(Runtime &runtime, Gatherer &gatherer, Reducer &reducer, Optimizer &optimizer, uint32_t number,
          fsdp_stream stream);
  // If the capture was not ended, restores the state from before it, and ends the device's capture.
  ~Capture();
  Capture(const Capture &) = delete;
  Capture &operator=(const Capture &) = delete;

  uint32_t number() const noexcept { return number_; }
  // Called when a call has failed: the graph then lacks work and cannot be used.
  void spoil(const char *call, const Error &error);
  // Describes the first failed call; empty if there is none.
  const std::string &failure() const noexcept { return failure_; }
  // Notes that the capture contains a step of AdamW. Each replay sets the lr and the corrections of the step.
  void add_step(const fsdp_adamw_options &options);
  // Notes that the capture computes a norm. The host may ask for the norm after each replay.
  void add_norm(const char *call);
  // Joins streams of the library that were forked into the capture with the caller's stream.
  void join(fsdp_stream stream);
  bool has_step() const noexcept { return has_step_; }
  // Does the capture open the update window? If it does, main weights may be written in it or after it, but not before
  // it.
  bool opens_window() const noexcept {
    return !before_.step.window_open && (after_.step.window_open || after_.step.version != before_.step.version);
  }
  const fsdp_adamw_options &adamw() const noexcept { return adamw_; }  // options of the step in the capture
  // Ends the capture and restores the state from before it.
  void end();
  // Says how the model differs from its state when the capture began; empty if it does not.
  std::string find_difference() const;
  void enter(double lr, fsdp_stream stream);
  void leave(device::Stream &caller);

 private:
  void await_library();
  void fork(device::Stream &caller);
  Moment read() const;
  void write(const Moment &state);
  void require_sole_model(const char *call) const;

  Runtime &runtime_;
  Gatherer &gatherer_;
  Reducer &reducer_;
  Optimizer &optimizer_;
  uint32_t number_;
  bool under_way_ = true;
  std::string failure_;
  const char *name_;  // the flight recorder's copy
  Moment before_, after_;
  CallSequence calls_;        // as before the capture
  std::string step_failure_;  // as before the capture
  KnownNorm norm_;            // as before the capture
  bool has_step_ = false, has_norm_ = false;
  uint64_t lr_scales_ = 0;  // hash of the lr_scales at the step, as in Step
  uint64_t trained_;        // hash of the trained parameters at the beginning
  fsdp_adamw_options adamw_{};
};

}  // namespace fsdp::engine
