// SPDX-License-Identifier: Apache-2.0
// A part of a step as a CUDA graph. The caller's stream is captured by the caller; between begin and end the library's
// calls record into that capture what they would enqueue, and its streams join it by events. What the calls did to the
// model's state is kept and undone at the end, since nothing of it has happened yet. A replay then is three things:
//
//   prepare   the state must be the one from before the capture, on every rank; the graph comes after all that the
//   library
//             was given; the step's numbers are written to the device
//   launch    the caller's
//   commit    the state goes on as the calls of the capture said, and what follows comes after the graph; or
//   cancel    there was no launch: the state is the one from before the capture still
//
// Nothing of the graph may refer to events from before it: begin waits until the library's work is done, and prepare
// orders what has been enqueued since. Graphs drives it.
#pragma once

#include "engine/gradients/optimizer.h"
#include "engine/model/moment.h"

namespace fsdp::engine {

// How a call that failed is told to other ranks.
std::string describe_failure(const char *call, const Error &error);

class Capture {
 public:
  // number: of the model's captures, from 1, the same on every rank.
  Capture(Runtime &runtime, Gatherer &gatherer, Reducer &reducer, Optimizer &optimizer, uint32_t number,
          fsdp_stream stream);
  // One that was not ended: the state goes back, and the device's capture ends.
  ~Capture();
  Capture(const Capture &) = delete;
  Capture &operator=(const Capture &) = delete;

  uint32_t number() const noexcept { return number_; }
  // A call has failed, so that the graph lacks something: it is of no use.
  void spoil(const char *call, const Error &error);
  // The first such call; empty if there is none.
  const std::string &failure() const noexcept { return failure_; }
  // A step of AdamW is a part of it: its lr and corrections are those of each replay.
  void add_step(const fsdp_adamw_options &options);
  // A norm is found in it, which the host may ask for after each replay.
  void add_norm(const char *call);
  // Streams of the library that were forked into the capture come back to the caller's.
  void join(fsdp_stream stream);
  bool has_step() const noexcept { return has_step_; }
  // It opens the update window: main weights may be written in it or after it, and not before.
  bool opens_window() const noexcept {
    return !before_.step.window_open && (after_.step.window_open || after_.step.version != before_.step.version);
  }
  const fsdp_adamw_options &adamw() const noexcept { return adamw_; }  // of that step
  // Ends it, with the state from before.
  void end();
  // What of the model is not as it was when the capture began, as text; empty if nothing.
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
  CallSequence calls_;        // before
  std::string step_failure_;  // before
  KnownNorm norm_;            // before
  bool has_step_ = false, has_norm_ = false;
  uint64_t lr_scales_ = 0;  // of that step, as Runtime has them
  uint64_t trained_;        // ... and which parameters are trained, from the beginning
  fsdp_adamw_options adamw_{};
};

}  // namespace fsdp::engine
