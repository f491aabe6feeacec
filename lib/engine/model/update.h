// SPDX-License-Identifier: Apache-2.0
// The update window of a sealed model: what opens it, what happens in it to main weights, and what closes it. All ranks
// meet at each of these.
#pragma once

#include "base/checked.h"
#include "engine/gradients/given_grads.h"
#include "engine/gradients/optimizer.h"
#include "engine/gradients/reduce.h"
#include "engine/model/checkpoints.h"
#include "engine/model/graphs.h"
#include "engine/runtime/meetings.h"
#include "engine/weights/gather.h"

namespace fsdp::engine {

class UpdateWindow {
 public:
  // adamw: else the optimizer is the caller's.
  UpdateWindow(Runtime &runtime, Gatherer &gatherer, Reducer &reducer, Optimizer &optimizer, Checkpoints &checkpoints,
               Meetings &meetings, Graphs &graphs, bool adamw)
      : runtime_(runtime),
        gatherer_(gatherer),
        reducer_(reducer),
        optimizer_(optimizer),
        checkpoints_(checkpoints),
        meetings_(meetings),
        graphs_(graphs),
        given_(runtime),
        adamw_(adamw) {}

  void finish_grads(double scale, uint32_t flags, fsdp_stream stream, const StepNumbers &numbers = {});
  void begin(fsdp_stream stream);
  void publish(fsdp_stream stream);
  void step_adamw(double lr, const fsdp_adamw_options &options, fsdp_stream stream);
  // A whole step from gradients that the caller has. norm: NULL if it was not asked for.
  void apply_grads(const Strided<fsdp_grad> &grads, double lr, double max_norm, const fsdp_adamw_options &options,
                   fsdp_stream stream, double *norm);
  void discard(fsdp_stream stream);

  // Neither has a step begun to take gradients, nor has the window those of one.
  void require_between_steps(const char *call) const;
  // The window is open and holds the gradients of a finished step.
  void require_grads(const char *call) const { runtime_.step.require_grads(call); }
  // ... and the host may wait for what it asks of them. The stream that it asks on.
  device::Stream &require_measurable(fsdp_stream stream, const char *call);
  // The same for a norm. It may be part of a graph if no call waits for it: the host neither reads nor adds it.
  device::Stream &require_norm(fsdp_stream stream, bool waits, const char *call);
  // What a step still has to do before it can end, as text; empty if nothing.
  std::string list_unfinished() const;

 private:
  void require_adamw(const char *call) const;
  void capture_norm(bool waits, const char *call);
  // -- how a step ends (update.cpp) --
  void end_step(Meetings::Arrival call, device::Stream &caller);
  void await_readers(device::Stream &caller);
  void put_grads(const Strided<fsdp_grad> &grads, fsdp_stream stream);
  void open_with_grads(device::Stream &caller);
  void check_grads(const Strided<fsdp_grad> &grads, const char *call) const;
  // -- publish.cpp --
  void close_window(device::Stream &caller);
  device::Stream &gather_outer_weights(device::Stream &caller);
  void refresh_whole_weights(device::Stream &caller);
  // -- discard.cpp --
  void realign();
  void end_messages(fsdp_stream stream);
  void await_ended_steps();
  void realign_messages();

  Runtime &runtime_;
  Gatherer &gatherer_;
  Reducer &reducer_;
  Optimizer &optimizer_;
  Checkpoints &checkpoints_;
  Meetings &meetings_;
  Graphs &graphs_;
  GivenGrads given_;
  bool adamw_;
};

}  // namespace fsdp::engine
